"""Fixtures that many tests share; and the order of the tests, in one process or in two.

All that start clusters come first and together, who shares one last among them: it neither idles beside other tests nor
starts twice. In `pytest -n 2` one process takes all of these and the other the rest, file by file, until the clusters
are done: there is one cluster at a time, and what waits for it costs the others nothing.
"""

from pathlib import Path
from typing import Any

import hypothesis
import pytest

from cluster.model_store import resolve
from pdserve.errors import ConfigError

STARTS_CLUSTERS = ("tests/e2e/", "tests/chaos/test_table.py")

# A busy machine is no failure, and every run tests the same examples.
hypothesis.settings.register_profile(
    "pdserve", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("pdserve")


@pytest.hookimpl(trylast=True)  # after the order has been shuffled
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "toy_cluster" in fixtures(item) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))  # any of them may be the one that waits for the start
    items.sort(key=turn)


def turn(item: pytest.Item) -> int:
    """When it comes: with the others of the same number."""
    if not item.nodeid.startswith(STARTS_CLUSTERS):
        return 3
    if "toy_cluster" not in fixtures(item):
        return 0
    return 1 if "cluster" in fixtures(item) else 2  # as it was, or used up


def fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ClustersApart(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        """All that start clusters are as one file."""

        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if nodeid.startswith(STARTS_CLUSTERS) else str(super()._split_scope(nodeid))

    return ClustersApart(config, log)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The demo model as a Hugging Face folder, converted once into the user's cache; skips where its package is absent.

    The same cache that `pdserve up` uses: the folder is read-only to tests.
    """
    try:
        return resolve("smollm2").folder
    except ConfigError as error:
        pytest.skip(str(error))
