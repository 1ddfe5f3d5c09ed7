"""Fixtures that many tests share."""

from pathlib import Path

import hypothesis
import pytest

from cluster.model_store import resolve
from pdserve.errors import ConfigError

# A busy machine is no failure, and every run tests the same examples.
hypothesis.settings.register_profile(
    "pdserve", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("pdserve")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The demo model as a Hugging Face folder, converted once into the user's cache; skips where its package is absent.

    The same cache that `pdserve up` uses: the folder is read-only to tests.
    """
    try:
        return resolve("smollm2").folder
    except ConfigError as error:
        pytest.skip(str(error))
