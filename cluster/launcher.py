"""Workers as Ray actors: placed by Ray, started again by Ray when their process dies, and by us when they give up.

A worker's life here: `keep(node)` creates its actor and calls `run` on it, which lasts as long as the worker is of
use. The process is killed -> Ray starts it again and calls `run` again. `run` raises -> the process is replaced, and
`run` called again after a while. `run` returns -> the worker was drained, and its actor ends for good. No token and no
tensor ever passes through Ray.

Import this module after `cluster.session.open_session`: Ray reads its environment when it is imported.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from cluster.patience import Patience
from cluster.process_end import process_end
from cluster.worker_actor import WorkerActor
from pdserve.config import ClusterConfig, NodeConfig
from pdserve.errors import ConfigError, Unavailable, WorkerLost

T = TypeVar("T")

OBJECT_STORE_BYTES = 80 * 2**20  # the least that Ray accepts, nearly: nothing goes through it
STOP_LIMIT_S = 15.0
# A dead node is found in 1.2 s instead of 15; a worker process is started when an actor needs one, not before
_SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}

_VITAL = ("gcs_server", "raylet")

log = logging.getLogger(__name__)


class Launcher:
    """A Ray of our own, or a share in one that runs already."""

    def __init__(self, config: ClusterConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it may not take over our signals
        # One thread for its whole life: Ray's processes die with the thread that started them. And not the main
        # thread, where Ray would take over SIGTERM.
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._obey, name="ray", daemon=True).start()

    async def start(self) -> None:
        """Start or join Ray; takes seconds. Raises ConfigError when there is no cluster to join, else Unavailable."""
        await self._call(self._join if self._config.ray_address else self._start_own)

    async def keep(self, node: NodeConfig, patience: Patience) -> str:
        """Run a worker, again and again, until it leaves for good: returns how. Raises Unavailable when hopeless."""
        actor = await self._call(lambda: self._create(node))
        while True:
            began = time.monotonic()
            try:
                left = await self._run(actor, node)
            except WorkerLost as ended:
                wait_s = patience.wait_s(time.monotonic() - began, str(ended))
                log.warning("%s ended: %s; again in %.1f s", node.worker_id, ended, wait_s)
                await self._call(lambda: ray.kill(actor, no_restart=False))  # a fresh process for the next attempt
                await asyncio.sleep(wait_s)
            else:
                await self._call(lambda: ray.kill(actor, no_restart=True))
                return left

    async def watch(self) -> NoReturn:
        """Wait until a Ray process that all depends on ends; raises Unavailable."""
        vital = [child for child in psutil.Process().children() if child.name() in _VITAL]
        ends = [asyncio.create_task(process_end(child.pid), name=child.name()) for child in vital]
        if not ends:  # a Ray that is not ours is not ours to watch
            await asyncio.Event().wait()
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        raise Unavailable(f"Ray's {done.pop().get_name()} ended; its workers would not be started again")

    async def stop(self) -> None:
        """End all workers, and Ray where it is ours; what takes too long is left to the reaper."""
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._call(ray.shutdown)
        except TimeoutError:
            log.warning("Ray did not end within %.0f s", STOP_LIMIT_S)

    async def _call(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._calls.put((function, future))
        return await asyncio.wrap_future(future)

    def _obey(self) -> None:
        """Make the calls, one after the other; the thread is a daemon, as a call into Ray may never return."""
        while True:
            function, future = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # root of the thread: its caller gets it
                    future.set_exception(error)

    async def _run(self, actor: Any, node: NodeConfig) -> str:
        """How the worker left for good. Raises WorkerLost with what else ended it."""
        result = await self._call(lambda: actor.run.remote(node.to_json()))
        try:
            return str(await asyncio.wrap_future(result.future()))
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(f"{node.worker_id}: {error.cause}") from None
            raise WorkerLost(f"{type(error.cause).__name__}: {error.cause}") from None
        except RayError as error:
            raise WorkerLost(str(error).splitlines()[0]) from None

    def _start_own(self) -> None:
        config = self._config
        try:
            ray.init(
                address="local",
                num_cpus=(config.prefill + config.decode) * config.threads,  # a promise to Ray, not to the machine
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self._folder / "ray"),
                _system_config=_SYSTEM_CONFIG,
            )
        except Exception as error:  # on a busy machine Ray gives itself up after 30 s with nothing narrower
            raise Unavailable(f"Ray did not start, try again: {str(error).splitlines()[0]}") from error

    def _join(self) -> None:
        try:
            ray.init(address=self._config.ray_address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"ray_address: {str(error).splitlines()[0]}") from None
        needed, there = (self._config.prefill + self._config.decode) * self._config.threads, ray.cluster_resources()
        if there.get("CPU", 0) < needed:  # Ray would wait for ever
            ray.shutdown()
            raise ConfigError(f"ray_address: the cluster has {there.get('CPU', 0):g} CPUs, the workers need {needed}")

    def _create(self, node: NodeConfig) -> Any:
        remote = ray.remote(WorkerActor).options(
            name=node.worker_id,
            namespace=node.namespace,
            num_cpus=self._config.threads,
            num_gpus=self._gpu_share(),
            max_restarts=-1,
            max_task_retries=-1,
        )
        return remote.remote()

    def _gpu_share(self) -> float:
        """GPUs of one worker: whole ones where there are enough, else equal shares of what is there."""
        if self._config.device != "cuda":
            return 0
        gpus = ray.cluster_resources().get("GPU", 0)
        if not gpus:
            raise Unavailable("device: cuda, but Ray sees no GPU")
        per_gpu = -(-(self._config.prefill + self._config.decode) // int(gpus))
        return 1 / per_gpu
