"""Stubs of the public wire contract, generated from `proto/pdserve/v1` by `make proto`."""
