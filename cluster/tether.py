"""Processes that cannot outlive the one that started them.

`tethered(command)` is the same command behind a tiny start: it asks the kernel for a SIGTERM when its parent is gone,
then becomes the command (same process id). The kernel watches the *thread* that forked, so start from the main thread.
No preexec_fn: running Python between fork and exec is not safe beside the threads of gRPC and Ray.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def tethered(command: Sequence[str]) -> list[str]:
    """What to start instead of `command`."""
    return [sys.executable, "-S", "-E", "-P", __file__, str(os.getpid()), *command]


def last_line(path: Path) -> str:
    """The end of a log, for one line of error."""
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def main() -> None:
    """Tie this process to its parent and become the command: `tether.py PARENT_PID COMMAND…`."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:  # else it died before the kernel was asked
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
