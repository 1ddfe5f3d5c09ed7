"""How long a CPU of this machine stood still: what no process on it can be blamed for.

One thread per CPU, pinned to it, sleeps for 10 ms and looks how long that took; what took far longer is written down.
A thread that hardly runs is due at once on a CPU that is merely busy. It is a process of its own, so that our own work
does not hold it up.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAP_S = 0.01
WORTH_NOTING_S = 0.15


class Stillness:
    """What has been written down so far."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def longest_s(self, since: float, until: float) -> float:
        """The longest standstill that overlaps these times of time.monotonic; 0 where there was none."""
        lines = (line.split() for line in self._notes.read_text().splitlines())
        gaps = [(float(began), float(gap_s)) for began, gap_s in lines]
        return max((gap_s for began, gap_s in gaps if began < until and began + gap_s > since), default=0.0)


@contextmanager
def noting(folder: Path) -> Iterator[Stillness]:
    """Watch all CPUs for the time of the block."""
    notes = folder / "stillness"
    notes.touch()
    process = subprocess.Popen([sys.executable, "-m", __name__, str(notes)])
    try:
        yield Stillness(notes)
    finally:
        process.kill()
        process.wait()


def _watch(cpu: int, notes: Path) -> None:
    os.sched_setaffinity(0, {cpu})  # of this thread
    last = time.monotonic()
    while True:
        time.sleep(NAP_S)
        now = time.monotonic()
        if now - last > WORTH_NOTING_S:
            with notes.open("a") as file:
                file.write(f"{last} {now - last}\n")
        last = now


def main() -> None:
    """Watch until killed, or until whoever asked has gone."""
    parent = os.getppid()
    for cpu in sorted(os.sched_getaffinity(0)):
        threading.Thread(target=_watch, args=(cpu, Path(sys.argv[1])), daemon=True).start()
    while os.getppid() == parent:
        time.sleep(1)


if __name__ == "__main__":
    main()
