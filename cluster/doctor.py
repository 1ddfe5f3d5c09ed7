"""`pdserve doctor`: the floors of a model on a machine, how many requests fit, and what running workers reach of it.

Its life: which model and settings (as `up` decides them, or as a router says that they are) -> what the machine allows
(given as flags, or measured: here, or by the running workers when they started) -> arithmetic -> `doctor_report`.
"""

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc.aio

from cluster import model_store
from cluster.doctor_report import Model, Report, Room, report
from cluster.flags import DoctorFlags
from cluster.generate import explained
from cluster.live import live
from cluster.machine import machine, measured, reported
from cluster.plan import num_gpus
from cluster.status import CALL_LIMIT_S
from cluster.worker_node import engine_config
from decode_worker.capacity import capacity
from engine.config_file import read_config
from engine.floors import ModelCost, decode_floor, model_cost, prefill_floor
from engine.kv_cache import kv_layout
from engine.load import EngineConfig, choose_num_pages
from engine.model_config import ModelConfig
from pdserve import rpc
from pdserve.config import ClusterConfig, load_config, resolve
from pdserve.errors import ConfigError
from pdserve.model_card import KvLayout
from pdserve.v1.cluster_pb2 import GetStatusRequest, WorkerStatus
from pdserve.v1.cluster_pb2_grpc import ClusterServiceStub
from pdserve.v1.generation_pb2 import GetModelRequest
from pdserve.v1.generation_pb2 import Model as ServedModel
from pdserve.v1.generation_pb2_grpc import GenerationServiceStub

PROMPTS = (128, 512, 2000)
BATCHES = (1, 8, 16, 32)


@dataclass(frozen=True)
class Running:
    """What a router says."""

    model: ServedModel
    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True)
class Case:
    """One model in one dtype."""

    config: ClusterConfig  # resolved
    folder: Path
    model: ModelConfig
    layout: KvLayout
    cost: ModelCost

    @property
    def engine(self) -> EngineConfig:
        """Of every worker."""
        return engine_config(self.config, str(self.folder))


def doctor(flags: DoctorFlags) -> None:
    """Look and print. Raises PdserveError."""
    found = examine(flags)
    sys.stdout.write((json.dumps(asdict(found)) if flags.json else report(found)) + "\n")


def examine(flags: DoctorFlags) -> Report:
    """Everything that is asked for. Raises PdserveError."""
    running = asyncio.run(_ask(flags.address)) if flags.address else None
    case = _case(flags, running)
    workers = running.workers if running else ()
    found = machine(flags.read_gb_s, flags.tflops, lambda: reported(workers) or measured(case.engine))
    prompts = sorted({*PROMPTS, flags.prompt_tokens})
    context = flags.prompt_tokens + flags.completion_tokens // 2
    lives = [live(worker, found.limits) for worker in workers]
    return Report(
        model=_model(case),
        machine=found,
        prefill=tuple(prefill_floor(case.cost, found.limits, n) for n in prompts if n <= case.model.window),
        decode=tuple(decode_floor(case.cost, found.limits, batch, context) for batch in BATCHES),
        room=_room(flags, case, running),
        workers=tuple(each for each in lives if each) if running else None,
    )


async def _ask(address: str) -> Running:
    async with rpc.client_channel(address) as channel:
        try:
            model = await GenerationServiceStub(channel).GetModel(GetModelRequest(), timeout=CALL_LIMIT_S)
            status = await ClusterServiceStub(channel).GetStatus(GetStatusRequest(), timeout=CALL_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            raise explained(error, address) from None
    return Running(model.model, tuple(status.workers))


def _case(flags: DoctorFlags, running: Running | None) -> Case:
    settings = flags.settings() | ({"dtype": running.model.dtype} if running else {})
    config = resolve(load_config(flags.config, settings), num_gpus())
    folder = _folder(config.model)
    model = read_config(folder)
    if flags.prompt_tokens + flags.completion_tokens > model.window:
        lengths = f"{flags.prompt_tokens} + {flags.completion_tokens}"
        raise ConfigError(f"prompt_tokens and completion_tokens: {lengths} exceed the window of {model.window}")
    if running and (running.model.vocab_size, running.model.context_window) != (model.vocab_size, model.window):
        raise ConfigError(f"model: {config.model} is not what runs at {flags.address}: name {running.model.name}")
    layout = kv_layout(model, config.dtype)
    return Case(config, folder, model, layout, model_cost(model, layout))


def _folder(model: str) -> Path:
    """Floors need no weights: a config.json is enough."""
    path = Path(model).expanduser()
    return path.resolve() if (path / "config.json").is_file() else model_store.resolve(model).folder


def _model(case: Case) -> Model:
    cost = case.cost
    step_bytes = round(cost.decode(1, 0).read_bytes)
    sizes = cost.num_parameters, cost.stored_bytes, step_bytes, cost.kv_token_bytes
    return Model(str(case.folder), case.layout.dtype, case.model.window, *sizes)


def _room(flags: DoctorFlags, case: Case, running: Running | None) -> Room:
    pages, source = _pages(flags, case, running)
    held = [capacity(case.layout, count, flags.prompt_tokens, flags.completion_tokens) for count in pages]
    return Room(
        prompt_tokens=flags.prompt_tokens,
        completion_tokens=flags.completion_tokens,
        pages=pages,
        page_tokens=case.layout.page_tokens,
        source=source,
        admitted=sum(each.admitted for each in held),
        to_the_end=sum(each.to_the_end for each in held),
    )


def _pages(flags: DoctorFlags, case: Case, running: Running | None) -> tuple[tuple[int, ...], str]:
    """Of each decode worker, and where that is from."""
    if running:
        return tuple(each.pages.total for each in running.workers if each.role == "decode"), "as they run"
    source, count = "as `up` would take", 0
    if case.config.num_pages or flags.memory_gb is None:
        count = choose_num_pages(case.engine, case.model, case.layout)
    else:
        source = f"all of {flags.memory_gb:g} GB beside the weights"
        count = int(flags.memory_gb * 1e9 - case.cost.stored_bytes) // case.layout.page_bytes
    if count < 1:
        raise ConfigError(f"memory_gb: {flags.memory_gb:g} do not hold the weights, {case.cost.stored_bytes / 1e9:.1f}")
    return (count,) * case.config.decode, source
