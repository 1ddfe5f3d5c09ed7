"""What the folders must hold so that flat packages stay safe: names that are ours alone, types, no Python in proto/."""

from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pdserve", "engine", "transport", "router", "prefill_worker", "decode_worker", "cluster")
IN_CHECKOUT = ("tests", "scripts", "examples", "benchmarks")


def test_no_other_distribution_provides_our_names() -> None:
    providers = packages_distributions()
    others = {name: set(providers.get(name, [])) - {"pdserve"} for name in PACKAGES + IN_CHECKOUT}
    assert {name: dists for name, dists in others.items() if dists} == {}


def test_proto_holds_no_python() -> None:
    # ray's dependencies bring proto-plus, whose import name is `proto`
    assert list((ROOT / "proto").rglob("*.py")) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_a_package_and_typed(name: str) -> None:
    assert (ROOT / name / "__init__.py").exists()
    assert (ROOT / name / "py.typed").exists()


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
