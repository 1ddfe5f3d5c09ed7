"""`pdserve drain` and `pdserve chaos`: commands for one worker, by way of a router."""

import asyncio
import sys
import time

from cluster.flags import ChaosFlags, DrainFlags, Harm
from cluster.status import CALL_LIMIT_S, cluster_service
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1 import cluster_pb2_grpc

POLL_S = 0.2
LEAVE_LIMIT_S = 15.0  # beside the limit for running work: to expel, to say the last, to be missed by the router


def drain(flags: DrainFlags) -> None:
    """Let a worker leave, and wait until it has. Raises PdserveError."""
    asyncio.run(_drain(flags))


async def _drain(flags: DrainFlags) -> None:
    async with cluster_service(flags.address) as service:
        worker = _named(flags.worker, await _status(service))
        began = time.monotonic()
        request = pb.DrainWorkerRequest(worker=worker.id, limit_s=flags.limit_s, force=flags.force)
        await service.DrainWorker(request, timeout=CALL_LIMIT_S)
        _say(f"{worker.id} takes no new work; {worker.load.requests} requests have {flags.limit_s:g} s to finish")
        try:
            async with asyncio.timeout(flags.limit_s + LEAVE_LIMIT_S):
                await _gone(service, worker)
        except TimeoutError:
            raise Unavailable(f"{worker.id} is still there after {flags.limit_s + LEAVE_LIMIT_S:g} s") from None
        took_s = time.monotonic() - began
        rest = "; what still ran goes on elsewhere" if took_s > flags.limit_s and worker.load.requests else ""
        _say(f"{worker.id} has left after {took_s:.1f} s{rest}")


async def _status(service: "cluster_pb2_grpc.ClusterServiceAsyncStub") -> dict[str, pb.WorkerStatus]:
    status = await service.GetStatus(pb.GetStatusRequest(), timeout=CALL_LIMIT_S)
    return {worker.id: worker for worker in status.workers}


def _named(name: str, workers: dict[str, pb.WorkerStatus]) -> pb.WorkerStatus:
    """The worker of this name, with what it does now. Raises InvalidRequest."""
    if name not in workers:
        raise InvalidRequest("worker", f"{name!r} is not there; there are: {', '.join(workers) or 'none'}")
    return workers[name]


async def _gone(service: "cluster_pb2_grpc.ClusterServiceAsyncStub", worker: pb.WorkerStatus) -> None:
    """Wait until the router does not see the worker any more. Raises Unavailable when it comes back instead."""
    while (now := (await _status(service)).get(worker.id)) is not None:
        if now.incarnation != worker.incarnation:
            raise Unavailable(f"{worker.id} died before it had drained, and has been started again: drain it again")
        await asyncio.sleep(POLL_S)


def chaos(flags: ChaosFlags) -> None:
    """Harm a worker. Raises PdserveError."""
    harm = {
        Harm.KILL: pb.Chaos(kill=True),
        Harm.STOP: pb.Chaos(stop_s=flags.for_s),
        Harm.CUT: pb.Chaos(cut=True),
        Harm.SLOW: pb.Chaos(slow=pb.Slow(bytes_per_s=flags.bytes_per_s, for_s=flags.for_s)),
    }[flags.harm]
    asyncio.run(_inflict(flags.address, pb.InflictChaosRequest(worker=flags.worker, chaos=harm)))
    _say(f"{flags.worker}: {flags.harm.value}")


async def _inflict(address: str, request: pb.InflictChaosRequest) -> None:
    async with cluster_service(address) as service:
        await service.InflictChaos(request, timeout=CALL_LIMIT_S)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
