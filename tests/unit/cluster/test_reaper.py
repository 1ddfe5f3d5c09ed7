"""The reaper ends what carries its session's mark, and nothing else, once its pipe closes."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster import reaper

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "session"
    (path / "logs").mkdir(parents=True)
    return path


def test_nothing_of_the_session_survives_a_closed_pipe(folder: Path) -> None:
    ours = {**os.environ, reaper.MARK: str(folder)}
    theirs = {**os.environ, reaper.MARK: f"{folder}-other"}
    with (
        subprocess.Popen(SLEEPER, env=ours) as sleeper,
        subprocess.Popen(STUBBORN, env=ours, stdout=subprocess.PIPE) as stubborn,
        subprocess.Popen(SLEEPER, env=theirs) as stranger,
        reaper.start(folder) as watcher,
    ):
        assert stubborn.stdout is not None
        assert watcher.stdin is not None
        stubborn.stdout.readline()  # it ignores SIGTERM from here on
        watcher.terminate()  # a reaper is not to be talked out of it
        assert {each.pid for each in reaper.marked(str(folder))} == {sleeper.pid, stubborn.pid}
        watcher.stdin.close()
        ended = (sleeper.wait(20), stubborn.wait(20), watcher.wait(20), stranger.poll())
        stranger.kill()
        assert ended == (-15, -9, 0, None)
    assert not folder.exists()


def test_a_mark_behind_a_process_title_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = psutil.Process()
    environ = tmp_path / str(ours.pid) / "environ"
    environ.parent.mkdir()
    monkeypatch.setattr(reaper, "PROC", tmp_path)
    environ.write_bytes(b"ray::Agent\0\0\0\0\0PDSERVE_SESSION=/tmp/s\0")  # as Ray's agents leave it
    assert reaper.carries(ours, b"PDSERVE_SESSION=/tmp/s")
    assert not reaper.carries(ours, b"PDSERVE_SESSION=/tmp")
