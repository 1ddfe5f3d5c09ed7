"""Generate the gRPC stubs of proto/ into a folder: `python -m scripts.gen_proto [FOLDER]`, by default the repository.

The path below proto/ is the Python package, so the output needs no repair. The stubs are committed; grpcio-tools and
mypy-protobuf are pinned exactly because they decide the bytes, and tests/unit/test_proto_fresh.py compares them.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT_IN = ("python", "grpc_python")
PLUGINS = ("mypy", "mypy_grpc")  # of mypy-protobuf, scripts beside this interpreter


def generate(target: Path) -> list[Path]:
    """Write the stubs below `target` and return their paths relative to it."""
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    plugins = [f"--plugin=protoc-gen-{name}={Path(sys.executable).parent}/protoc-gen-{name}" for name in PLUGINS]
    outs = [f"--{name}_out=quiet:{target}" for name in PLUGINS] + [f"--{name}_out={target}" for name in BUILT_IN]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *plugins, *outs, *map(str, protos)]
    subprocess.run(command, check=True)
    return [stub for proto in protos for stub in stubs_of(proto.relative_to(ROOT / "proto"))]


def stubs_of(proto: Path) -> list[Path]:
    """The generated files of one proto file."""
    return [proto.with_name(proto.stem + suffix) for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")]


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
