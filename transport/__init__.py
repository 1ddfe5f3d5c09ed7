"""KV payloads from one process to another: links over Gloo or NCCL. Knows no requests; see `transport.base`."""
