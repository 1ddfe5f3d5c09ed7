"""How near its machine's limits a worker was in the last seconds, from what `GetStatus` says of it."""

from dataclasses import dataclass

from pdserve.speed import Limits, Work
from pdserve.v1 import cluster_pb2 as pb


@dataclass(frozen=True)
class Live:
    """Rates of one worker. Shares of a limit are those of its busy time: waiting is no fault of the engine."""

    worker: str
    role: str
    span_s: float  # over which it was watched
    busy: float  # share of the span
    tokens_per_s: float
    pass_tokens: float | None  # rows of the average pass; None where a pass takes longer than the span
    pass_ms: float | None
    of_floor: float  # the least time that the work can take / the time that it took
    mfu: float  # FLOPs of the model per second / limit
    mbu: float  # bytes of weights and KV per second / limit


def live(worker: pb.WorkerStatus, limits: Limits | None = None) -> Live | None:
    """Against its own limits, or those given; None while it computes nothing, or has no limits."""
    recent = worker.recent
    if limits is None and worker.HasField("limits"):
        limits = Limits(worker.limits.read_bytes_per_s, worker.limits.flops_per_s)
    if limits is None or not recent.flops or not recent.busy_s or not recent.clock_s:
        return None
    work = Work(flops=recent.flops, read_bytes=recent.read_bytes)
    return Live(
        worker=worker.id,
        role=worker.role,
        span_s=recent.clock_s,
        busy=min(recent.busy_s / recent.clock_s, 1.0),
        tokens_per_s=recent.tokens / recent.clock_s,
        pass_tokens=recent.tokens / recent.passes if recent.passes else None,
        pass_ms=1000 * recent.busy_s / recent.passes if recent.passes else None,
        of_floor=limits.floor_s(work) / recent.busy_s,
        mfu=limits.compute_s(work) / recent.busy_s,
        mbu=limits.read_s(work) / recent.busy_s,
    )


def percent(share: float) -> str:
    """Without decimals."""
    return f"{100 * share:.0f} %"
