"""Who stays a member: a worker that is lost may come back, one that had drained has left."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve import rpc
from pdserve.internal.v1 import worker_pb2, worker_pb2_grpc
from pdserve.membership import WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId
from pdserve.v1.cluster_pb2 import Load
from router import directory as module
from router.directory import Directory

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_tokens=16, dtype="float32", page_format="toy")
CARD = ModelCard("toy", 512, 512, (2,), "f", LAYOUT, exact=True)


class OneBeat(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that beats once per connection, and is gone."""

    def __init__(self, beat: worker_pb2.WatchResponse) -> None:
        self.beat = beat
        self.num_connections = 0

    async def Watch(self, request: worker_pb2.WatchRequest, context: object) -> AsyncIterator[worker_pb2.WatchResponse]:
        self.num_connections += 1
        yield self.beat
        await asyncio.sleep(0.05)  # for the directory to see it


class Members:
    """A registry that never hears of anybody's leaving."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info

    async def views(self) -> AsyncIterator[tuple[WorkerInfo, ...]]:
        yield (self._info,)
        await asyncio.Event().wait()


@pytest.mark.parametrize(("draining", "num_requests"), [(False, 0), (True, 0), (True, 1)])
async def test_who_had_drained_has_left_though_the_registry_does_not_say_so(
    draining: bool, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECONNECT_DELAY_S", 0.01)
    beat = worker_pb2.WatchResponse(incarnation="inc", draining=draining, load=Load(requests=num_requests))
    worker, server = OneBeat(beat), rpc.server()  # type: ignore[abstract]  # it is only watched
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    address = f"127.0.0.1:{rpc.listen(server, '127.0.0.1', 0)}"
    await server.start()
    info = WorkerInfo(WorkerId("prefill-0"), "prefill", Incarnation("inc"), address, 1, CARD)
    directory = Directory(Members(info), stuck_after_s=5, on_change=lambda: None)
    running = asyncio.create_task(directory.run())
    has_left = draining and not num_requests
    async with asyncio.timeout(20):
        while (worker.num_connections < 3) if not has_left else (not worker.num_connections or directory.members):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    assert (directory.members, worker.num_connections == 1) == (((), True) if has_left else ((info,), False))
    assert directory.silent == directory.members
