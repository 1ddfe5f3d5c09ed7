"""Stubs of the internal wire contract, generated from `proto/pdserve/internal/v1` by `make proto`."""
