#!/bin/sh
# What the engine and the hand-over do on a machine with one CUDA device: under 8 minutes, nobody need look on.
# Needs Python with torch, triton, numpy, safetensors, transformers and grpcio; nothing is installed or fetched.
#
#     benchmarks/gpu.sh [--out FOLDER] [--parts decode,prefill] [--dry]
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
