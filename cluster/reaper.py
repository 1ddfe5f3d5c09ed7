"""The last process of a cluster on this machine: when `pdserve up` is gone, however it went, nothing stays behind.

`up` marks everything that it starts with an environment variable, which children inherit, Ray's included. The reaper
waits on a pipe from `up`. The pipe closes when `up` ends or is killed; then the reaper ends what still carries the
mark, removes the session's folder, and ends itself.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

MARK = "PDSERVE_SESSION"  # environment variable; its value is the session's folder
GRACE_S = 3.0
PROC = Path("/proc")


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the reaper of `folder` and wait until nothing but SIGKILL ends it; closing its stdin lets it work."""
    command = [sys.executable, "-m", "cluster.reaper", str(folder)]
    # a session of its own: Ctrl-C in a terminal reaches the whole foreground group
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    if not process.stdout or not process.stdout.readline():
        raise RuntimeError("the reaper did not start")
    return process


def marked(folder: str) -> list[psutil.Process]:
    """The processes of this session that still run, the caller excepted."""
    entry = f"{MARK}={folder}".encode()
    others = (process for process in psutil.process_iter() if process != psutil.Process())
    return [process for process in others if carries(process, entry) or is_titled(process, folder)]


def carries(process: psutil.Process, entry: bytes) -> bool:
    """Whether the environment of the process, as it was at its start, holds `NAME=value`."""
    # not psutil's own parser, which stops at the gap where a process title was written over the environment
    try:
        return entry in (PROC / str(process.pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # gone, or another user's; a zombie's is empty


def is_titled(process: psutil.Process, folder: str) -> bool:
    """Whether it is one of Ray's that wrote a title over its whole environment, and has a file of the folder open."""
    proc = PROC / str(process.pid)
    try:
        if not (proc / "cmdline").read_bytes().startswith(b"ray::"):
            return False
        targets = [str(link.readlink()) for link in (proc / "fd").iterdir()]
    except OSError:
        return False
    return any(target.startswith(f"{folder}/") for target in targets)


def reap(folder: str) -> None:
    """End all marked processes, politely first, and remove the folder."""
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        processes = marked(folder)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(processes, timeout=GRACE_S)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for end of file on stdin, then reap."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.write("watching\n")
    sys.stdout.close()
    sys.stdin.buffer.read()
    reap(sys.argv[1])


if __name__ == "__main__":
    main()
