"""What can go wrong in a run: each fault is a value that says when, to whom and for how long."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch

from tests.chaos.simulation.cluster import Cluster
from tests.chaos.simulation.nodes import DecodeNode, PrefillNode, WorkerNode


class Fault(Protocol):
    """One thing that goes wrong."""

    @property
    def at_s(self) -> float:
        """When."""

    def inflict(self, cluster: Cluster) -> None:
        """Does nothing when the victim is not there."""


@dataclass(frozen=True)
class KillWorker:
    """SIGKILL; the next incarnation comes later."""

    at_s: float
    worker: str
    back_after_s: float

    def inflict(self, cluster: Cluster) -> None:
        cluster.later(cluster.kill_worker(self.worker, self.back_after_s))


@dataclass(frozen=True)
class KillRouter:
    """SIGKILL; its clients go on elsewhere."""

    at_s: float
    router: str
    back_after_s: float

    def inflict(self, cluster: Cluster) -> None:
        cluster.later(cluster.kill_router(self.router, self.back_after_s))


@dataclass(frozen=True)
class Stop:
    """SIGSTOP and SIGCONT of a worker or a router."""

    at_s: float
    victim: str
    for_s: float

    def inflict(self, cluster: Cluster) -> None:
        if host := cluster.host_of(self.victim):
            cluster.network.stop(host, self.for_s)


@dataclass(frozen=True)
class Hang:
    """One step of an engine takes long; beyond `stuck_after_s` the worker ends itself, as its watch does."""

    at_s: float
    worker: str
    for_s: float
    back_after_s: float = 0.5

    def inflict(self, cluster: Cluster) -> None:
        if node := cluster.workers.get(self.worker):
            node.engine.speed.hang_s = self.for_s
            if self.for_s > cluster.shape.stuck_after_s:
                cluster.later(self._end(cluster, node))

    async def _end(self, cluster: Cluster, node: WorkerNode) -> None:
        await asyncio.sleep(cluster.shape.stuck_after_s + 0.5)
        if cluster.workers.get(self.worker) is node:
            await cluster.kill_worker(self.worker, self.back_after_s)


@dataclass(frozen=True)
class Slow:
    """An engine that takes its time."""

    at_s: float
    worker: str
    factor: float
    for_s: float

    def inflict(self, cluster: Cluster) -> None:
        if node := cluster.workers.get(self.worker):
            node.engine.speed.factor = self.factor
            node.engine.speed.slow_until = cluster.loop.time() + self.for_s


@dataclass(frozen=True)
class CutWires:
    """The data path between two workers is gone; the control stream knows nothing of it."""

    at_s: float
    prefill: str
    decode: str

    def inflict(self, cluster: Cluster) -> None:
        ends = cluster.workers.get(self.prefill), cluster.workers.get(self.decode)
        if ends[0] and ends[1]:
            cluster.wires.cut(ends[0].host.name, ends[1].host.name)


@dataclass(frozen=True)
class CutLinks:
    """`pdserve chaos cut`: a worker fails all its links."""

    at_s: float
    worker: str

    def inflict(self, cluster: Cluster) -> None:
        node = cluster.workers.get(self.worker)
        if isinstance(node, PrefillNode | DecodeNode):
            node.host.own().run(node.links.cut)


@dataclass(frozen=True)
class BreakCalls:
    """All calls between two hosts break: what was on its way is lost."""

    at_s: float
    a: str
    b: str

    def inflict(self, cluster: Cluster) -> None:
        a, b = cluster.host_of(self.a), cluster.host_of(self.b)
        if a and b:
            cluster.network.break_between(a.name, b.name)


@dataclass(frozen=True)
class Part:
    """Nothing passes between two hosts for a while."""

    at_s: float
    a: str
    b: str
    for_s: float

    def inflict(self, cluster: Cluster) -> None:
        a, b = cluster.host_of(self.a), cluster.host_of(self.b)
        if a and b:
            cluster.network.part(a.name, b.name, self.for_s)


@dataclass(frozen=True)
class RegistryAway:
    """Redis is gone for a while."""

    at_s: float
    for_s: float

    def inflict(self, cluster: Cluster) -> None:
        cluster.registry.go_away(self.for_s)


@dataclass(frozen=True)
class DrainWorker:
    """The worker leaves politely; its next incarnation comes later."""

    at_s: float
    worker: str
    limit_s: float

    def inflict(self, cluster: Cluster) -> None:
        if node := cluster.workers.get(self.worker):
            node.host.own().run(node.drain.begin, self.limit_s)


@dataclass(frozen=True)
class Corrupt:
    """A byte of the next payload changes on its way; only where checksums are compared."""

    at_s: float
    byte: int

    def inflict(self, cluster: Cluster) -> None:
        def corrupt(payload: torch.Tensor) -> None:
            cluster.wires.on_arrival = lambda _: None
            payload[self.byte % len(payload)] ^= 0x10

        cluster.wires.on_arrival = corrupt


KINDS: tuple[type[Fault], ...] = (
    KillWorker,
    KillRouter,
    Stop,
    Hang,
    Slow,
    CutWires,
    CutLinks,
    BreakCalls,
    Part,
    RegistryAway,
    DrainWorker,
    Corrupt,
)


class FaultMaker:
    """Draws faults for a cluster of some size."""

    def __init__(self, random: Random, prefills: list[str], decodes: list[str], routers: list[str]) -> None:
        self._random = random
        self._prefills, self._decodes, self._routers = prefills, decodes, routers
        self._workers = prefills + decodes

    def make(self, at_s: float, *, verify_kv: bool) -> Fault:
        """One fault at this time."""
        random, worker = self._random, self._random.choice(self._workers)
        makers: list[tuple[int, Callable[[], Fault]]] = [
            (5, lambda: KillWorker(at_s, worker, random.uniform(0.1, 2.0))),
            (1, lambda: KillRouter(at_s, random.choice(self._routers), random.uniform(0.1, 1.0))),
            (2, lambda: Stop(at_s, worker, random.choice((0.3, 0.9, 1.5, 3.0, 6.0)))),
            (1, lambda: Stop(at_s, random.choice(self._routers), random.choice((0.3, 1.5, 5.0)))),
            (1, lambda: Hang(at_s, worker, random.choice((0.5, 1.5, 4.0)))),
            (1, lambda: Slow(at_s, worker, random.choice((3.0, 10.0, 30.0)), random.uniform(0.2, 2.0))),
            (2, lambda: CutWires(at_s, random.choice(self._prefills), random.choice(self._decodes))),
            (2, lambda: CutLinks(at_s, worker)),
            (2, lambda: BreakCalls(at_s, *self._pair())),
            (2, lambda: Part(at_s, *self._pair(), random.choice((0.2, 0.8, 2.0, 5.0)))),
            (1, lambda: RegistryAway(at_s, random.uniform(0.5, 3.0))),
            (2, lambda: DrainWorker(at_s, worker, random.choice((0.0, 0.1, 0.5, 5.0)))),
            (2 if verify_kv else 0, lambda: Corrupt(at_s, random.randrange(64))),
        ]
        make = random.choices([maker for _, maker in makers], [weight for weight, _ in makers])[0]
        return make()

    def _pair(self) -> tuple[str, str]:
        random = self._random
        if random.random() < 0.5:
            return random.choice(self._prefills), random.choice(self._decodes)
        return random.choice(self._routers), random.choice(self._workers)
