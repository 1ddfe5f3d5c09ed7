"""Random numbers without a generator of their own are the same in every order of the tests."""

import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which other libraries do as well


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
