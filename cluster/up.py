"""`pdserve up`: one cluster in the foreground, from nothing to ready, and back to nothing.

plan      what is asked for is checked, the model converted; nothing runs yet
session   a folder, a reaper, a marked environment; then Redis
serving   Ray and the router start side by side, workers as soon as Ray is there; one ready line; then a spare router
draining  on SIGINT, SIGTERM or a fault: the router finishes what runs, then workers, Ray, Redis and the rest end
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster.news import News
from cluster.patience import Patience
from cluster.plan import Plan, make_plan, node, worker_nodes
from cluster.readiness import router_ready
from cluster.redis_server import RedisServer
from cluster.registry import RegistryMembership
from cluster.session import Session, open_session
from cluster.supervisor import Supervisor
from pdserve.config import ClusterConfig, NodeConfig
from pdserve.errors import ConfigError, Unavailable

START_LIMIT_S = 600.0
DRAIN_LIMIT_S = 12.0  # the router gives running requests 10 s
ROUTERS = ("router-0", "router-1")  # one serves, the other is its warm spare

log = logging.getLogger(__name__)


def up(config: ClusterConfig, ready_file: Path | None) -> None:
    """Run a cluster until SIGINT or SIGTERM. Raises ConfigError before anything is started, Unavailable after that."""
    _check_ready_file(ready_file)
    plan = make_plan(config, say)
    session = open_session(plan.config)
    redis = None
    try:
        redis = None if plan.config.redis_url else RedisServer(session.folder)
        plan = replace(plan, config=replace(plan.config, redis_url=redis.url if redis else plan.config.redis_url))
        # Ray prints what befalls its workers on standard output, which belongs to the ready line
        with (session.log_dir / "ray.log").open("a") as ray_log, redirect_stdout(ray_log):
            asyncio.run(_Cluster(plan, session, redis, ready_file).run())
    finally:
        if redis:
            redis.stop()
        session.close()


def _check_ready_file(path: Path | None) -> None:
    """Before anything is started. One that an earlier, killed `up` has left behind would say ready too early."""
    if path is not None:
        try:
            path.unlink(missing_ok=True)
            _write_atomically(path, "")
            path.unlink()
        except OSError as error:
            raise ConfigError(f"--ready-file {path}: {error.strerror}") from None


def say(line: str) -> None:
    """Progress for a person: standard output belongs to the ready line."""
    sys.stderr.write(f"pdserve: {line}\n")
    sys.stderr.flush()


class _Cluster:
    """The running parts of one `up`."""

    def __init__(self, plan: Plan, session: Session, redis: RedisServer | None, ready_file: Path | None) -> None:
        from cluster.launcher import Launcher  # after the session has set Ray's environment

        self._plan = plan
        self._session = session
        self._redis = redis
        self._ready_file = ready_file
        allowed = sorted(os.sched_getaffinity(0))
        self._workers = [self._of_session(each) for each in worker_nodes(plan, allowed)]
        self._patience = {name: Patience(name) for name in (*ROUTERS, *(each.worker_id for each in self._workers))}
        self._launcher = Launcher(plan.config, session.folder)
        self._router, self._spare = self._make_routers()
        self._is_ready = asyncio.Event()
        self._stops = 0
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until told to stop or a part fails; always leaves in order."""
        self._listen_to_signals()
        routers = self._router.keep(), self._keep_spare()
        parts: list[Coroutine[Any, Any, Any]] = [*routers, self._work(), self._announce(), self._stop.wait()]
        if self._redis:
            parts.append(self._redis.keep())
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await _first_end(tasks)
        finally:
            await self._leave(tasks)

    def _listen_to_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        signal.alarm(0)  # Ray's own handler of SIGTERM, where it came first, aborts the process in three seconds
        self._stops += 1
        self._stop.set()
        if self._stops > 1:
            self._router.kill()
            self._spare.kill()

    async def _leave(self, tasks: list["asyncio.Task[Any]"]) -> None:
        say(
            "stopping: running requests have 10 s to finish; a second signal ends them"
            if self._stops == 1
            else "stopping"
        )
        if self._ready_file:
            self._ready_file.unlink(missing_ok=True)
        await _cancel(tasks[:2])  # routers are not started again; workers still are until these have drained
        limit_s = DRAIN_LIMIT_S if self._stops < 2 else 0
        await asyncio.gather(self._spare.drain(limit_s), self._router.drain(limit_s))
        await _cancel(tasks)
        await self._launcher.stop()

    async def _keep_spare(self) -> None:
        """The second router, loaded and waiting: not before the cluster is up, which needs the cores."""
        await self._is_ready.wait()
        await self._spare.keep()

    async def _work(self) -> None:
        """Ray, and every worker in it; fails with the first that is hopeless."""
        await self._launcher.start()
        self._listen_to_signals()  # Ray has put a handler of its own over ours
        say(f"Ray is up; starting {len(self._workers)} workers, which load {self._plan.config.name}")
        parts = (self._launcher.watch(), *map(self._keep, self._workers))
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await _first_end(tasks, asyncio.FIRST_EXCEPTION)  # a worker that leaves is none
        finally:
            await _cancel(tasks)

    async def _keep(self, worker: NodeConfig) -> None:
        left = await self._launcher.keep(worker, self._patience[worker.worker_id])
        say(f"{worker.worker_id} has left: {left}")

    async def _announce(self) -> None:
        """The ready line; then news of workers, for as long as the cluster lives."""
        expected = {each.worker_id for each in self._workers}
        complete = asyncio.Event()
        members = RegistryMembership(self._plan.config.redis_url, self._session.id)
        news = News(members, self._plan.config.stuck_after_s, say)
        following = asyncio.create_task(news.follow(expected, complete))
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await complete.wait()
                await router_ready(self._plan.address, expected)
            self._on_ready()
            await following
        except TimeoutError:
            raise Unavailable(
                f"not ready within {START_LIMIT_S:.0f} s; the logs are in {self._session.log_dir}"
            ) from None
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    def _on_ready(self) -> None:
        for patience in self._patience.values():
            patience.started()
        self._is_ready.set()
        address, redis_url, pid = self._plan.address, self._plan.config.redis_url, os.getpid()
        if self._ready_file:
            _write_atomically(self._ready_file, json.dumps({"grpc": address, "redis": redis_url, "pid": pid}))
        print(
            f"pdserve ready grpc={address} redis={_without_password(redis_url)} pid={pid}",
            file=sys.__stdout__,
            flush=True,
        )

    def _of_session(self, each: NodeConfig) -> NodeConfig:
        # on another machine our log folder need not exist: there Ray keeps the worker's output
        log_dir = "" if self._plan.config.ray_address else str(self._session.log_dir)
        return replace(each, namespace=self._session.id, log_dir=log_dir)

    def _make_routers(self) -> list[Supervisor]:
        """The same command twice: which of the two serves is a matter of whose turn it is."""
        path = self._session.folder / "router.json"
        path.write_text(self._of_session(node(self._plan, "router", 0)).to_json(), encoding="utf-8")
        command = [sys.executable, "-m", "cluster.node", str(path)]
        logs = [(name, self._session.log_dir / f"{name}.log") for name in ROUTERS]
        return [Supervisor(name, command, log_path, self._patience[name]) for name, log_path in logs]


async def _first_end(tasks: Sequence["asyncio.Task[Any]"], kind: str = asyncio.FIRST_COMPLETED) -> None:
    """Wait for the first task to end (or to fail, with FIRST_EXCEPTION); raises what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=kind)
    for task in done:
        task.result()


async def _cancel(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.touch(mode=0o600)  # a Redis URL may hold a password
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url
