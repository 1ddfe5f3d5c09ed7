"""Random numbers without a generator of their own are the same in every order of the tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
