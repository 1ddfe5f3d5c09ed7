"""The wheel as a router's image installs it: complete, importable from anywhere, and without torch."""

import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of an environment that holds `pdserve[router]` and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    constraints = str(ROOT / "constraints.txt")
    run(str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}[router]")
    return folder / "bin"


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
