"""pdserve: a prefill/decode server for large language models whose hand-over you can trust and read.

This package is the vocabulary that every process speaks: configuration, errors, identities, requests, the
model card, and the gRPC plumbing with its generated stubs (`pdserve.v1`, `pdserve.internal.v1`).
It imports no torch and none of the other packages.
"""

__version__ = "0.1.0"
