"""The composition root of a run: routers and workers on one virtual loop, and everything that can be done to them."""

import asyncio
import itertools
from collections.abc import Coroutine
from random import Random

from pdserve.membership import Role
from tests.chaos.simulation.membership import Registry
from tests.chaos.simulation.network import Network
from tests.chaos.simulation.nodes import DecodeNode, PrefillNode, RouterNode, WorkerNode, World, worker_info
from tests.chaos.simulation.shape import Shape
from tests.chaos.simulation.virtual_loop import Host, VirtualLoop
from tests.chaos.simulation.wires import WireNet


class Cluster:
    """All processes that live; made on a running virtual loop."""

    def __init__(self, loop: VirtualLoop, shape: Shape, random: Random) -> None:
        self.loop = loop
        self.shape = shape
        self.random = random
        self.network = Network(loop, random, shape.weather)
        self.wires = WireNet(self.network, shape.link)
        self.registry = Registry(self.network)
        self.world = World(shape, self.network, self.wires, self.registry)
        self.workers: dict[str, WorkerNode] = {}  # by worker id
        self.routers: dict[str, RouterNode] = {}  # by name
        self.dead: list[WorkerNode] = []
        self._numbers = itertools.count(1)
        self._restarts: dict[asyncio.Task[None], None] = {}

    def start(self) -> None:
        """Everything at once."""
        for number in range(self.shape.decodes):
            self.start_worker("decode", f"decode-{number}")
        for number in range(self.shape.prefills):
            self.start_worker("prefill", f"prefill-{number}")
        for number in range(self.shape.routers):
            self.start_router(f"router-{number}")

    def start_worker(self, role: Role, worker: str) -> None:
        """A new incarnation."""
        info = worker_info(self.world, role, worker, next(self._numbers))
        host = Host(info.incarnation, self.loop)
        self.note(f"start {info.incarnation}")
        kind = PrefillNode if role == "prefill" else DecodeNode
        node = host.own().run(kind, self.world, host, info)
        self.workers[worker] = node
        serving = host.spawn(node.serve())
        serving.add_done_callback(lambda done: self._ended(node, done))

    def _ended(self, node: WorkerNode, serving: "asyncio.Task[None]") -> None:
        """Killed, failed, or drained: a drained one comes back as a new incarnation, as after an upgrade."""
        if serving.cancelled() or node.host.is_dead:
            return
        if error := serving.exception():
            self.network.problems.append(f"{node.host.name} failed: {error!r}")
        self.later(self.kill_worker(node.info.id, restart_after_s=self.random.uniform(0.2, 1.0)))

    def start_router(self, name: str) -> None:
        """A new router; nothing is left of the old one."""
        host = Host(f"{name}.{next(self._numbers)}", self.loop)
        self.note(f"start {host.name}")
        node = host.own().run(RouterNode, self.world, host)
        self.routers[name] = node
        host.spawn(node.serve())

    def note(self, what: str) -> None:
        """Into the trace."""
        self.network.note(what, "")

    def later(self, work: Coroutine[object, object, None]) -> None:
        """A task of no host that the end of the run waits for."""
        task = self.loop.create_task(work)
        self._restarts[task] = None
        task.add_done_callback(lambda done: self._restarts.pop(done, None))

    async def settled(self) -> None:
        """Wait until whoever was killed is back."""
        while self._restarts:
            await asyncio.wait(list(self._restarts))

    async def kill_worker(self, worker: str, restart_after_s: float) -> None:
        """SIGKILL; its next incarnation is back after a while."""
        node = self.workers.pop(worker, None)
        if node is None:
            return
        self.dead.append(node)
        self.note(f"kill {node.host.name}")
        await self.kill(node.host)
        await asyncio.sleep(restart_after_s)
        self.start_worker(node.info.role, worker)

    async def kill_router(self, name: str, restart_after_s: float) -> None:
        """SIGKILL; another one is back after a while."""
        node = self.routers.pop(name, None)
        if node is None:
            return
        self.note(f"kill {node.host.name}")
        await self.kill(node.host)
        await asyncio.sleep(restart_after_s)
        self.start_router(name)

    async def kill(self, host: Host) -> None:
        """Everything of it vanishes at once."""
        for address, server in list(self.network.servers.items()):
            if server.host is host:
                del self.network.servers[address]
        self.network.break_of(host)
        await host.end()

    def host_of(self, name: str) -> Host | None:
        """Of a worker or a router, while it lives."""
        node = self.workers.get(name) or self.routers.get(name)
        return node.host if node else None

    def all_nodes(self) -> list[WorkerNode]:
        """Workers, dead ones included."""
        return [*self.dead, *self.workers.values()]

    def hosts(self) -> list[Host]:
        """All that live."""
        return [*(node.host for node in self.workers.values()), *(node.host for node in self.routers.values())]
