"""What a worker has computed in the last few seconds: the difference of two of its counters, both from its beats."""

from collections import deque

from pdserve.v1.cluster_pb2 import Work

SPAN_S = 5.0
_MAX_BEATS = 64  # of a worker whose clock does not move


class Recent:
    """Looks back at least `SPAN_S`, or to the first beat."""

    def __init__(self, first: Work) -> None:
        self._samples = deque([first], maxlen=_MAX_BEATS)

    def add(self, now: Work) -> None:
        """The counters of the next beat."""
        self._samples.append(now)
        while self._samples[1].clock_s <= now.clock_s - SPAN_S:
            self._samples.popleft()

    def work(self) -> Work:
        """Of the span; clock_s is how long it was."""
        first, last = self._samples[0], self._samples[-1]
        fields = (each.name for each in Work.DESCRIPTOR.fields)
        return Work(**{name: max(getattr(last, name) - getattr(first, name), 0) for name in fields})
