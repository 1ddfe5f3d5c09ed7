"""How much a worker has computed, and what its machine allows: plain numbers that travel with its beats."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Counters since a worker started; only differences of two mean something. Also: what one pass costs."""

    clock_s: float = 0.0  # the worker's, when it looked at the others
    busy_s: float = 0.0  # inside steps
    passes: int = 0  # that are complete
    tokens: int = 0  # rows of those passes
    flops: float = 0.0  # of the model: products of linear layers and attention
    read_bytes: float = 0.0  # weights and KV, each once per pass


@dataclass(frozen=True)
class Limits:
    """What the memory bus and the arithmetic units of a machine allow to one worker."""

    read_bytes_per_s: float
    flops_per_s: float

    def read_s(self, work: Work) -> float:
        """For the bus."""
        return work.read_bytes / self.read_bytes_per_s

    def compute_s(self, work: Work) -> float:
        """For the arithmetic units."""
        return work.flops / self.flops_per_s

    def floor_s(self, work: Work) -> float:
        """The least that `work` can take, as both can be busy at once."""
        return max(self.read_s(work), self.compute_s(work))
