"""The wheel as a router's image installs it: complete, importable from anywhere, and without torch."""

import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pdserve", "engine", "transport", "router", "prefill_worker", "decode_worker", "cluster")

IMPORT_THE_ROUTER = """
import importlib, pkgutil, sys
from importlib.util import find_spec
import router
assert "site-packages" in router.__file__, router.__file__
for module in pkgutil.walk_packages(router.__path__, "router."):
    importlib.import_module(module.name)
assert find_spec("torch") is None and find_spec("ray") is None
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of an environment that holds `pdserve[router]` and nothing else.

    What the wheel asks for is linked from the environment of the tests: constraints.txt pins it, nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    python = str(folder / "bin" / "python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", str(wheel))
    (site,) = folder.glob("lib/*/site-packages")
    (ours,) = metadata.distributions(name="pdserve", path=[str(site)])
    for name in needed_by(ours, {"router"}):
        link(metadata.distribution(name), site)
    return folder / "bin"


def needed_by(distribution: metadata.Distribution, extras: set[str]) -> set[str]:
    """The distributions that this one asks for with these extras, and those that they ask for."""
    asked: set[tuple[str, str]] = set()
    waiting = [(distribution, extra) for extra in {"", *extras}]
    while waiting:
        asking, extra = waiting.pop()
        for each in map(Requirement, asking.requires or []):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                new = {(canonicalize_name(each.name), extra) for extra in {"", *each.extras}} - asked
                asked |= new
                waiting += [(metadata.distribution(name), extra) for name, extra in new]
    return {name for name, _ in asked}


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Make it importable in `site`; file by file, as `google` is a folder of several distributions."""
    for file in distribution.files or []:
        source, target = Path(str(distribution.locate_file(file))), site / file
        if ".." not in file.parts and source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


def test_the_wheel_holds_every_file_of_every_package(wheel: Path) -> None:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    ours = {str(path.relative_to(ROOT)) for path in paths if path.is_file() and "__pycache__" not in path.parts}
    assert ours - set(ZipFile(wheel).namelist()) == set()


def test_the_wheel_installs_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_router_imports_without_torch(bare: Path) -> None:
    run(str(bare / "python"), "-c", IMPORT_THE_ROUTER)


def test_help_works_without_torch(bare: Path) -> None:
    assert "generate" in run(str(bare / "pdserve"), "--help")


def run(*command: str, cwd: Path = Path("/")) -> str:
    """Run from a folder where our checkout cannot be found by accident; a failure shows what was printed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
