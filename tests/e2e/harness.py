"""`pdserve up` as a subprocess, and a client that keeps every number of an answer."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import psutil

from cluster.readiness import is_linked
from cluster.reaper import MARK, PROC
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
READY_LIMIT_S = 180.0  # 13 on two idle cores


@dataclass
class Answer:
    """All that came for one request."""

    started: generation_pb2.Started | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each delta, seconds
    finished: generation_pb2.Finished | None = None

    def add(self, response: generation_pb2.GenerateResponse) -> None:
        """Take one message; token numbers must have no gap."""
        match response.WhichOneof("event"):
            case "started":
                self.started = response.started
            case "delta":
                self._add_delta(response.delta)
            case "finished":
                self.finished = response.finished

    def _add_delta(self, delta: generation_pb2.Delta) -> None:
        if delta.token_ids:
            assert delta.token_number == len(self.token_ids), "a token was lost or doubled"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.times.append(time.monotonic())
        for step in delta.top_logprobs:
            self.logprobs.append(tuple((each.token_id, each.logprob) for each in step.candidates))


@dataclass(frozen=True)
class Cluster:
    """A running `pdserve up`."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path
    session: Path  # its private folder

    async def follow(self, request: generation_pb2.GenerateRequest, answer: Answer, timeout_s: float = 110) -> None:
        """Fill in `answer` as it comes, over a channel of its own. Raises grpc.aio.AioRpcError."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=timeout_s)
            async for response in call:
                answer.add(response)

    async def generate(self, request: generation_pb2.GenerateRequest, timeout_s: float = 110) -> Answer:
        """One whole answer. Raises grpc.aio.AioRpcError."""
        answer = Answer()
        await self.follow(request, answer, timeout_s)
        return answer

    async def generate_all(self, requests: Sequence[generation_pb2.GenerateRequest], concurrency: int) -> list[Answer]:
        """All answers in the order of `requests`, so many at a time."""
        limit = asyncio.Semaphore(concurrency)

        async def one(request: generation_pb2.GenerateRequest) -> Answer:
            async with limit:
                return await self.generate(request)

        return list(await asyncio.gather(*map(one, requests)))

    def status(self) -> cluster_pb2.GetStatusResponse:
        """What the router sees."""
        with grpc.insecure_channel(self.address) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            return stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=5)

    def wait_until(
        self, what: str, limit_s: float, holds: Callable[[cluster_pb2.GetStatusResponse], bool]
    ) -> cluster_pb2.GetStatusResponse:
        """Poll the status until `holds(status)`; fails with the last status."""
        deadline = time.monotonic() + limit_s
        while True:
            status = self.status()
            if holds(status):
                return status
            assert time.monotonic() < deadline, f"not {what} within {limit_s:g} s: {status}"
            time.sleep(0.1)

    def wait_complete(self, num_workers: int, limit_s: float = 60) -> cluster_pb2.GetStatusResponse:
        """Until all workers are there, and linked."""
        return self.wait_until(
            "complete", limit_s, lambda status: len(status.workers) == num_workers and is_linked(status)
        )

    def assert_clean(self, limit_s: float = 10) -> None:
        """Every page free, nothing queued or running, on every worker."""
        self.wait_until("clean", limit_s, is_clean)


def is_clean(status: cluster_pb2.GetStatusResponse) -> bool:
    """Whether no worker holds or promises anything."""
    pages = [worker.pages for worker in status.workers]
    idle = all(page.in_use == 0 and page.promised == 0 and page.free + page.cached == page.total for page in pages)
    return idle and not status.queued_requests and all(worker.load.requests == 0 for worker in status.workers)


@contextmanager
def running_cluster(folder: Path, *flags: str, check_exit: bool = True) -> Iterator[Cluster]:
    """`pdserve up` with these flags until the block ends; its log stands in `folder`."""
    ready, log = folder / "ready.json", folder / "up.log"
    command = [sys.executable, "-m", "cluster.cli", "up", "--ready-file", str(ready), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        said = _wait_ready(process, ready, log)
        yield Cluster(said["grpc"], process, log, session_of(said))
    finally:
        code = stop(process)
    assert not check_exit or code == 0, f"up ended with {code}: {log.read_text()[-2000:]}"


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> dict[str, str]:
    deadline = time.monotonic() + READY_LIMIT_S
    while not ready.exists():
        assert process.poll() is None, f"up ended early: {log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"not ready: {log.read_text()[-4000:]}"
        time.sleep(0.1)
    said: dict[str, str] = json.loads(ready.read_text())
    return said


def session_of(ready: dict[str, str]) -> Path:
    """The private folder, known from the socket of its Redis."""
    return Path(ready["redis"].removeprefix("unix://")).parent


def stop(process: subprocess.Popen[bytes], limit_s: float = 40) -> int:
    """SIGTERM and wait; SIGKILL when that does not end it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return -signal.SIGKILL


def is_alive(pid: int) -> bool:
    """Whether a process of this id runs (a zombie does not)."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def of_session(session: Path) -> list[int]:
    """Process ids that carry the session's mark."""
    entry, found = f"{MARK}={session}".encode(), []
    for pid in psutil.pids():
        try:
            environ = (PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        if entry in environ.split(b"\0"):
            found.append(pid)
    return found


def child(session: Path, pattern: str) -> psutil.Process:
    """The one process of the session whose command line matches."""
    (one,) = children(session, pattern)
    return one


def children(session: Path, pattern: str) -> list[psutil.Process]:
    """The processes of the session whose command lines match."""
    found: list[psutil.Process] = []
    for pid in of_session(session):
        with suppress(psutil.NoSuchProcess):  # Ray's helpers come and go
            process = psutil.Process(pid)
            found += [process] if re.search(pattern, " ".join(process.cmdline())) else []
    return found


def serving_router(session: Path, address: str) -> psutil.Process:
    """The one that listens; the other one is its spare."""
    port = int(address.rpartition(":")[2])
    routers = children(session, "cluster.node")
    listening = [each for each in routers if any(port == at.laddr.port for at in each.net_connections("tcp"))]
    (one,) = listening
    return one


def free_port() -> int:
    """One that no outgoing connection takes meanwhile: below the kernel's range for those."""
    while True:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def token_request(
    token_ids: Sequence[int], max_tokens: int, *, seed: int | None = None, top_logprobs: int = 0
) -> generation_pb2.GenerateRequest:
    """Greedy without a seed, at temperature 1 with one; never ended by EOS."""
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=token_ids), top_logprobs=top_logprobs
    )
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    request.sampling.temperature = 0.0 if seed is None else 1.0
    if seed is not None:
        request.sampling.seed = seed
    return request
