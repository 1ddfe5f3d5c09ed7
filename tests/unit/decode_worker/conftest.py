"""Decode workers with toy engines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.toy import toy_engine, write_toy_model
from tests.unit.decode_worker.stage import Prefill, Stage


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def stage_of(toy_folder: Path) -> Callable[[int], Stage]:
    """A worker with so many pages."""
    return lambda num_pages: Stage(toy_engine(toy_folder, num_pages=num_pages))


@pytest.fixture
def prefill(toy_folder: Path) -> Prefill:
    return Prefill(toy_engine(toy_folder))
