"""`pdserve drain` and `pdserve chaos`: commands for one worker, by way of a router."""

import asyncio
import sys
import time

from cluster.flags import ChaosFlags, DrainFlags, Harm
from cluster.status import CALL_LIMIT_S, cluster_service
from pdserve.errors import Unavailable
from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1 import cluster_pb2_grpc

POLL_S = 0.2
LEAVE_LIMIT_S = 15.0  # beside the limit for running work: to expel, to say the last, to be missed by the router


def drain(flags: DrainFlags) -> None:
    """Let a worker leave, and wait until it has. Raises PdserveError, also when it was lost before that."""
    asyncio.run(_drain(flags))


async def _drain(flags: DrainFlags) -> None:
    async with cluster_service(flags.address) as service:
        began = time.monotonic()
        request = pb.DrainWorkerRequest(worker=flags.worker, limit_s=flags.limit_s, force=flags.force)
        told = await service.DrainWorker(request, timeout=CALL_LIMIT_S)
        _say(f"{flags.worker} takes no new work; {told.requests} requests have {flags.limit_s:g} s to finish")
        await _gone(service, flags.worker, told.incarnation, flags.limit_s + LEAVE_LIMIT_S)
        took_s = time.monotonic() - began
        rest = "; what still ran goes on elsewhere" if took_s > flags.limit_s and told.requests else ""
        _say(f"{flags.worker} has left after {took_s:.1f} s{rest}")


async def _gone(
    service: "cluster_pb2_grpc.ClusterServiceAsyncStub", name: str, incarnation: str, limit_s: float
) -> None:
    """Wait until the worker has left. Raises Unavailable when it was lost instead, or has not left in time.

    One that is silent has not left: it stands still, or was lost, and comes back.
    """
    due = time.monotonic() + limit_s
    while True:
        status = await service.GetStatus(pb.GetStatusRequest(), timeout=CALL_LIMIT_S)
        heard = [worker.incarnation for worker in status.workers if worker.id == name]
        if any(each != incarnation for each in heard):
            raise Unavailable(f"{name} was lost before it had drained, and has been started again: drain it again")
        if not heard and name not in status.silent:
            return
        if time.monotonic() > due:
            state = "still there" if heard else "silent, it stands still or was lost before it had drained,"
            raise Unavailable(f"{name} is {state} after {limit_s:g} s: drain it again when it is at work")
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
