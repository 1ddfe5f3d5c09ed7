"""Fixtures that many tests share."""

from pathlib import Path

import pytest

from cluster.model_store import resolve
from pdserve.errors import ConfigError


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The demo model as a Hugging Face folder, converted once into the user's cache; skips where its package is absent.

    The same cache that `pdserve up` uses: the folder is read-only to tests.
    """
    try:
        return resolve("smollm2").folder
    except ConfigError as error:
        pytest.skip(str(error))
