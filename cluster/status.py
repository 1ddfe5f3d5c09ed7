"""`pdserve status`: the workers that a router sees, as a table or as one JSON object."""

import asyncio
import json
import sys
from typing import Any

import grpc.aio

from cluster.flags import RouterFlags
from cluster.generate import explained, plain
from pdserve import rpc
from pdserve.v1.cluster_pb2 import GetStatusRequest, GetStatusResponse, WorkerStatus
from pdserve.v1.cluster_pb2_grpc import ClusterServiceStub

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
    "EXACT",
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
        "queued_requests": response.queued_requests,
        "running_requests": response.running_requests,
    }


def table(response: GetStatusResponse) -> str:
    """Aligned columns, one line per worker, and a line about the router."""
    rows = [_HEAD, *map(_row, response.workers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"{response.queued_requests} requests queued, {response.running_requests} running"])


async def _ask(address: str) -> GetStatusResponse:
    async with rpc.channel(address) as channel:
        try:
            return await ClusterServiceStub(channel).GetStatus(GetStatusRequest(), timeout=CALL_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            raise explained(error, address) from None


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    nested = {"load": plain(worker.load), "pages": plain(worker.pages), "linked": list(worker.linked)}
    return {**plain(worker), **nested}


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    pages = (worker.pages.total, worker.pages.free, worker.pages.cached, worker.pages.in_use, worker.pages.promised)
    numbers = (worker.load.requests, worker.load.queued_tokens, *pages)
    exact = "yes" if worker.exact else "no"
    linked = ",".join(worker.linked)
    return worker.id, worker.role, str(worker.pid), worker.address, *map(str, numbers), exact, linked
