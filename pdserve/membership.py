"""Who is in the cluster: what a worker says of itself when it registers. Discovery only; liveness is elsewhere."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

from pdserve.model_card import ModelCard
from pdserve.request import Incarnation, WorkerId

Role = Literal["prefill", "decode"]


@dataclass(frozen=True)
class WorkerInfo:
    """One incarnation of one worker."""

    id: WorkerId
    role: Role
    incarnation: Incarnation
    address: str  # host:port of its gRPC server
    pid: int
    card: ModelCard


class Membership(Protocol):
    """Where the view of the cluster comes from: Redis in a cluster, a list in tests."""

    def views(self) -> AsyncIterator[tuple[WorkerInfo, ...]]:
        """Yield the present members at once, then again after every change; never ends by itself."""
        ...
