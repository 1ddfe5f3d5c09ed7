"""`pdserve status`: the workers that a router sees, as a table or as one JSON object.

BUSY, MFU and MBU are of the last five seconds: the share of them that the engine was inside steps, and of that time the
share of the machine's FLOPs and of its memory bandwidth that the model was given.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from cluster.answers import plain
from cluster.flags import RouterFlags
from cluster.generate import explained
from cluster.live import live, percent
from pdserve import rpc
from pdserve.v1 import cluster_pb2_grpc
from pdserve.v1.cluster_pb2 import GetStatusRequest, GetStatusResponse, WorkerStatus

CALL_LIMIT_S = 10.0
_HEAD = (
    "ID",
    "ROLE",
    "PID",
    "ADDRESS",
    "REQUESTS",
    "QUEUED",
    "PAGES",
    "FREE",
    "CACHED",
    "IN USE",
    "PROMISED",
    "BUSY",
    "MFU",
    "MBU",
    "EXACT",
    "STATE",
    "LINKED",
)


def status(flags: RouterFlags) -> None:
    """Ask and print. Raises PdserveError."""
    response = asyncio.run(_ask(flags.address))
    sys.stdout.write((json.dumps(to_plain(response)) if flags.json else table(response)) + "\n")


def to_plain(response: GetStatusResponse) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "workers": [_worker(each) for each in response.workers],
        "silent": list(response.silent),
        "queued_requests": response.queued_requests,
        "running_requests": response.running_requests,
    }


def table(response: GetStatusResponse) -> str:
    """Aligned columns, one line per worker, and a line about the router."""
    lines = aligned([_HEAD, *map(_row, response.workers)])
    lines += [f"{worker} is silent: it stands still, was lost, or is starting" for worker in response.silent]
    return "\n".join([*lines, f"{response.queued_requests} requests queued, {response.running_requests} running"])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, its cells under those of the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


@asynccontextmanager
async def cluster_service(address: str) -> "AsyncIterator[cluster_pb2_grpc.ClusterServiceAsyncStub]":
    """A router's ClusterService; what its calls fail with becomes a typed error."""
    async with rpc.client_channel(address) as channel:
        try:
            yield cluster_pb2_grpc.ClusterServiceStub(channel)
        except grpc.aio.AioRpcError as error:
            raise explained(error, address) from None


async def _ask(address: str) -> GetStatusResponse:
    async with cluster_service(address) as service:
        return await service.GetStatus(GetStatusRequest(), timeout=CALL_LIMIT_S)


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    messages = ("load", "pages", "work", "recent", "limits")
    nested = {name: plain(getattr(worker, name)) for name in messages}
    return {**plain(worker), **nested, "linked": list(worker.linked)}


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    pages = (worker.pages.total, worker.pages.free, worker.pages.cached, worker.pages.in_use, worker.pages.promised)
    numbers = (worker.load.requests, worker.load.queued_tokens, *pages)
    exact = "yes" if worker.exact else "no"
    state = "draining" if worker.draining else "serving"
    return (
        worker.id,
        worker.role,
        str(worker.pid),
        worker.address,
        *map(str, numbers),
        *_shares(worker),
        exact,
        state,
        ",".join(worker.linked),
    )


def _shares(worker: WorkerStatus) -> tuple[str, str, str]:
    found = live(worker)
    return (percent(found.busy), percent(found.mfu), percent(found.mbu)) if found else ("-", "-", "-")
