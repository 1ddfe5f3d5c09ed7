"""Around Ray, without starting it: the environment, patience with what fails, and a worker's own log."""

import asyncio
import json
import os
import tempfile
from pathlib import Path

import pytest

from cluster.patience import FIRST_WAIT_S, LONGEST_WAIT_S, STEADY_S, Patience
from cluster.process_end import process_end
from cluster.reaper import MARK
from cluster.session import environment, open_session
from cluster.worker_actor import WorkerActor
from pdserve.config import ClusterConfig
from pdserve.errors import ConfigError, Unavailable


def test_our_own_ray_stays_on_loopback_and_asks_for_a_token(tmp_path: Path) -> None:
    one = environment(ClusterConfig(threads=3), tmp_path)
    assert one["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert one["RAY_AUTH_MODE"] == "token"
    assert one["RAY_worker_niceness"] == "0"
    assert one["RAY_AUTH_TOKEN"] != environment(ClusterConfig(), tmp_path)["RAY_AUTH_TOKEN"]
    assert one["OMP_NUM_THREADS"] == "3"


def test_a_ray_that_is_there_keeps_its_own_settings(tmp_path: Path) -> None:
    joined = environment(ClusterConfig(ray_address="10.0.0.1:6379"), tmp_path)
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"} & joined.keys()


def test_nccl_is_told_what_links_need(tmp_path: Path) -> None:
    assert "TORCH_NCCL_ENABLE_MONITORING" in environment(ClusterConfig(backend="nccl"), tmp_path)
    assert "TORCH_NCCL_ENABLE_MONITORING" not in environment(ClusterConfig(backend="gloo"), tmp_path)


def test_a_session_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment(ClusterConfig(), Path("/x")):
        monkeypatch.setenv(name, "")  # so that the environment is as before afterwards
    session = open_session(ClusterConfig())
    assert os.environ[MARK] == str(session.folder)
    assert session.folder.stat().st_mode & 0o777 == 0o700
    session.close()
    assert not session.folder.exists()


def test_logs_in_a_folder_of_the_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment(ClusterConfig(), Path("/x")):
        monkeypatch.setenv(name, "")
    session = open_session(ClusterConfig(run_dir=str(tmp_path / "mine")))
    (session.log_dir / "router-0.log").write_text("hello")
    session.close()
    assert (tmp_path / "mine" / "router-0.log").read_text() == "hello"


def test_a_long_temporary_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="too long for a unix socket; set TMPDIR=/tmp"):
        open_session(ClusterConfig())
    assert list(deep.iterdir()) == []


def test_a_hopeless_start_ends_with_the_reason() -> None:
    patience = Patience("decode-0")
    assert (patience.wait_s(1, "x"), patience.wait_s(1, "x")) == (FIRST_WAIT_S, 2 * FIRST_WAIT_S)
    with pytest.raises(Unavailable, match="decode-0 failed 3 times: no memory"):
        patience.wait_s(1, "no memory")


def test_once_ready_it_is_tried_for_ever_and_ever_more_slowly() -> None:
    patience = Patience("decode-0")
    patience.started()
    waits = [patience.wait_s(1, "x") for _ in range(20)]
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_WAIT_S
    assert patience.wait_s(STEADY_S + 1, "x") == FIRST_WAIT_S  # a long life is forgiven


def test_a_worker_refuses_what_is_not_its_configuration() -> None:
    with pytest.raises(ConfigError, match="node configuration"):
        WorkerActor().run(json.dumps({"role": "prefill"}))


async def test_the_end_of_a_process_is_noticed() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "30")
    waiting = asyncio.create_task(process_end(process.pid))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    process.kill()
    async with asyncio.timeout(10):
        await waiting
        await process.wait()
        await process_end(process.pid)  # gone altogether
