"""Who goes before whom, in the waiting room and among the prompts that wait on a prefill worker.

    arrival ──> rank ──> seat in the waiting room ──> queued on a prefill worker ──> computed

A request arrives once, and all its attempts are due when the first one was; see pdserve.due.
"""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Rank:
    """The least goes first."""

    priority: int
    is_new: bool  # what goes on after a fault comes first
    due: int
    place: int  # in order of arrival


@dataclass(frozen=True)
class Arrival:
    """A request's right to a place in line."""

    priority: int
    due: int
    place: int

    def rank(self, *, resumes: bool) -> Rank:
        """Of an attempt."""
        return Rank(self.priority, not resumes, self.due, self.place)


@dataclass(frozen=True, eq=False)
class QueuedPrompt:
    """One that a prefill worker was sent, and has not sampled from yet."""

    rank: Rank
    num_tokens: int  # to be computed


class QueuedPrompts:
    """Those of one router on one prefill worker."""

    def __init__(self) -> None:
        self._prompts: set[QueuedPrompt] = set()

    def add(self, prompt: QueuedPrompt) -> None:
        """It is sent."""
        self._prompts.add(prompt)

    def discard(self, prompt: QueuedPrompt) -> None:
        """It is computed, or given up; a second time is no error."""
        self._prompts.discard(prompt)

    @property
    def num_tokens(self) -> int:
        """Of all of them."""
        return sum(prompt.num_tokens for prompt in self._prompts)

    def tokens_before(self, rank: Rank) -> int:
        """Of those that go before one of this rank."""
        return sum(prompt.num_tokens for prompt in self._prompts if prompt.rank < rank)

    @property
    def num_resuming(self) -> int:
        """Those that go on after a fault."""
        return sum(not prompt.rank.is_new for prompt in self._prompts)
