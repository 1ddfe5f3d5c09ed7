"""How long to wait before something that ended is started again, and when to give up."""

from pdserve.errors import Unavailable

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 30.0
STEADY_S = 60.0  # whatever lived so long is not in a crash loop
START_ATTEMPTS = 3


class Patience:
    """Of one process: gives up early while the cluster starts, and never after that."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failures = 0
        self._starting = True

    def started(self) -> None:
        """The cluster has been ready: from here on, keep trying."""
        self._starting = False
        self._failures = 0

    def wait_s(self, lived_s: float, reason: str) -> float:
        """Seconds to wait after an end; raises Unavailable instead when the start is hopeless."""
        self._failures = 1 if lived_s > STEADY_S else self._failures + 1
        if self._starting and self._failures >= START_ATTEMPTS:
            raise Unavailable(f"{self._name} failed {self._failures} times: {reason}")
        return float(min(FIRST_WAIT_S * 2 ** (self._failures - 1), LONGEST_WAIT_S))
