"""The C kernels of `engine/csrc`, compiled by the system's compiler at first use and kept in the user's cache.

The name of the library in the cache is a hash of all that decides its content (sources, compiler, flags, CPU), so that
a new version never meets an old library. Processes that start together take turns through a file lock; the lock only
saves work, because a library appears in its place by an atomic rename. Calls release the GIL; for more than one thread,
OpenMP shares out their work (in the process of torch, by torch's libgomp). Without a compiler there is a warning, and
the torch twins serve instead.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-Wno-psabi", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 300.0
OPENMP = "-fopenmp"
_FUNCTIONS = (
    *("linear_forward", "write_kv", "attend", "rms_norm", "norm_heads", "silu_mul", "gelu_mul", "rotate"),
    "decoder_layer",
)


class Library:
    """The loaded functions. Each takes one structure and returns 0 or a negative number.

    `threads` is how many share the work of a call, for the fields of that name in the structures.
    """

    def __init__(self, path: Path, threads: int = 1) -> None:
        """Raises OSError when the file is not a library for this machine, AttributeError when a function is missing."""
        self.threads = threads
        functions = ctypes.CDLL(str(path))
        self._functions = {name: functions[name] for name in _FUNCTIONS}

    def call(self, name: str, args: ctypes.Structure) -> int:
        """Run a function; the tensors whose addresses `args` holds must live until it returns."""
        return int(self._functions[name](ctypes.byref(args)))


def load(
    compiler: str = "cc", flags: Sequence[str] = FLAGS, cache: Path | None = None, threads: int = 1
) -> Library | None:
    """The library, compiled now if need be; None, with a warning, where that is impossible.

    OpenMP comes in only for more than one thread; where the compiler lacks it there is one thread, with a warning.
    """
    command = shutil.which(compiler)
    if command is None:
        log.warning(
            "no C compiler (%s) found: the slower torch kernels serve instead; install gcc for the fast ones", compiler
        )
        return None
    arguments, folder = [command, *flags], cache or Path.home() / ".cache" / "pdserve"
    shared = _attempt([*arguments, OPENMP], folder, threads) if threads > 1 else ""
    if isinstance(shared, Library):
        return shared
    library = _attempt(arguments, folder, 1)
    if not isinstance(library, Library):
        log.warning("the C kernels do not compile or load, torch kernels serve instead: %s", library)
        return None
    if threads > 1:
        log.warning("threads: 1 instead of %d, because the C kernels do not compile with OpenMP: %s", threads, shared)
    return library


def _attempt(command: list[str], cache: Path, threads: int) -> Library | str:
    """The library, or the words of what went wrong."""
    try:
        return _load_cached(command, cache, threads)
    except (OSError, AttributeError, subprocess.SubprocessError) as problem:
        detail = getattr(problem, "stderr", None) or ""
        return f"{problem} {detail[-2000:]}"


def _load_cached(command: list[str], cache: Path, threads: int) -> Library:
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = os.access(cache, os.W_OK) and cache.stat().st_uid == os.getuid()
    except OSError:
        private = False
    if private:
        return Library(_compiled(command, cache), threads)
    with tempfile.TemporaryDirectory(prefix="pdserve-") as folder:  # once loaded, the file may go
        return Library(_compiled(command, Path(folder)), threads)


def _compiled(command: list[str], folder: Path) -> Path:
    target = folder / f"kernels-{_key(command)}.so"
    with _turn(target.with_suffix(".lock")):
        if not target.exists():
            _compile(command, target)
    return target


def _compile(command: list[str], target: Path) -> None:
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder,
        resources.as_file(_sources()) as sources,
    ):
        output = Path(folder) / target.name
        files = sorted(str(path) for path in sources.glob("*.c"))
        arguments = [*command, "-o", str(output), *files, "-lm"]
        subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        output.replace(target)


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock, or go on without it after LOCK_TIMEOUT_S (a holder that is stopped must not stop us)."""
    with path.open("w") as file:
        waiting = threading.Thread(target=fcntl.flock, args=(file.fileno(), fcntl.LOCK_EX), daemon=True)
        waiting.start()
        waiting.join(LOCK_TIMEOUT_S)
        yield


def _key(command: Sequence[str]) -> str:
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True, text=True, timeout=30).stdout
    digest = hashlib.sha256("\0".join([*command, version, platform.machine(), _cpu()]).encode())
    for file in sorted(_sources().iterdir(), key=lambda file: file.name):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """What -march=native depends on, as far as the system tells: model and feature flags of the first CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model", "flags", "Features", "CPU ")))


def _sources() -> resources.abc.Traversable:
    return resources.files("engine") / "csrc"
