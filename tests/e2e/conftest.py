"""One `pdserve up` for all that can share it, with the toy model; after each test it is complete and holds nothing."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.audit import collect, lasting
from tests.e2e.harness import Cluster, running_cluster
from tests.toy import write_toy_model
from tests.toy_tokenizer import write_toy_tokenizer


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 512 tokens that can be served with text."""
    folder = write_toy_model(tmp_path_factory.mktemp("model") / "toy")
    write_toy_tokenizer(folder)
    return folder


@pytest.fixture(scope="package")
def toy_cluster(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers."""
    flags = ("--model", str(toy_folder), "--prefill", "2", "--decode", "2", "--dtype", "float32")
    with running_cluster(tmp_path_factory.mktemp("up"), *flags, "--chaos", "--verify-kv") as cluster:
        yield cluster


@pytest.fixture
def cluster(toy_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster; every test, also one that kills parts of it, leaves it complete and clean."""
    yield toy_cluster
    status = toy_cluster.wait_complete(4)
    assert {worker.role for worker in status.workers} == {"prefill", "decode"}
    toy_cluster.assert_clean()
    assert lasting(asyncio.run(collect([toy_cluster.address]))) == []
