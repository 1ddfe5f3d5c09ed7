"""Stops one process for a while: `pause.py PID AFTER_S FOR_S`. Ends with that process, should it end first.

A process of its own, because whoever is stopped cannot wake itself up. It holds on to the process, not to its number.
"""

import os
import select
import signal
import sys


def main() -> None:
    """Wait, SIGSTOP, wait, SIGCONT."""
    pid, after_s, for_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    victim = os.pidfd_open(pid)  # readable once the process has ended
    for wait_s, number in ((after_s, signal.SIGSTOP), (for_s, signal.SIGCONT)):
        if select.select([victim], [], [], wait_s)[0]:
            return
        signal.pidfd_send_signal(victim, number)


if __name__ == "__main__":
    main()
