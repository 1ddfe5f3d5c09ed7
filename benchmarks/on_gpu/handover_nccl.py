"""What NCCL allows on one GPU: a group of one rank that sends to itself, and the two ranks of a link."""

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from benchmarks.on_gpu.handover import LIMIT_S, MIB, NEVER, Peer, bare_bytes, config, receive_all
from benchmarks.on_gpu.report import Context, Row
from pdserve.errors import PdserveError
from transport.torch_dist import NCCL_ENV, make_slots, nccl
from transport.wire import Group

SIZES = (4 * MIB, 64 * MIB, 512 * MIB)
NEEDS_CUDA = "needs CUDA"


def self_rows(context: Context) -> Iterator[Row]:
    """Coalesced, else each would wait for the other."""
    if context.is_dry:
        yield Row("nccl-self", "send to oneself", None, "", note=NEEDS_CUDA)
        return
    os.environ.update(NCCL_ENV)
    torch.cuda.set_device(0)
    store = c10d.HashStore()
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=limit, device_id=torch.device("cuda:0"))
    problems = []
    for name, exchange in (("batch_isend_irecv", _batched), ("group start and end", _grouped)):
        try:
            yield from _self_speed(context, name, exchange)
            return
        except (RuntimeError, ValueError, TypeError, AttributeError) as problem:
            problems.append(f"{name}: {str(problem).splitlines()[0]}")
    yield Row("nccl-self", "send to oneself", None, "", note=("torch refuses: " + "; ".join(problems))[:300])


def _self_speed(context: Context, name: str, exchange: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[Row]:
    for size in SIZES:
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        exchange(source, target)
        context.synchronize()
        assert torch.equal(source, target), "other bytes arrived"
        seconds = context.median_s(partial(exchange, source, target), 20)
        floor = context.rates.copy_bytes / 2 / 1e9
        yield Row("nccl-self", f"{size // MIB} MiB to oneself, {name}", size / seconds / 1e9, "GB/s", floor or None)


def _batched(source: torch.Tensor, target: torch.Tensor) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, source, 0), dist.P2POp(dist.irecv, target, 0)])
    for work in works:
        work.wait()


def _grouped(source: torch.Tensor, target: torch.Tensor) -> None:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(source.device)
    backend._group_start()  # type: ignore[attr-defined]
    works = [backend.send([source], 0, 0), backend.recv([target], 0, 0)]  # type: ignore[attr-defined]
    backend._group_end()  # type: ignore[attr-defined]
    for work in works:
        work.wait()


def pair_rows(context: Context) -> Iterator[Row]:
    """Two processes on the same GPU, as a link makes its group: NCCL may refuse that."""
    if context.is_dry:
        yield Row("nccl-pair", "two ranks on one GPU", None, "", note=NEEDS_CUDA)
        return
    os.environ.update(NCCL_ENV)
    try:
        with Peer(context, lambda: nccl(config(context, "nccl"), torch.device("cuda:0")), _serve) as peer:
            yield from _pair_speed(context, peer)
    except (RuntimeError, PdserveError, EOFError, TimeoutError) as problem:
        note = f"NCCL refuses: {str(problem).splitlines()[0] if str(problem) else type(problem).__name__}"
        yield Row("nccl-pair", "two ranks on one GPU", None, "", note=note[:300])


def _pair_speed(context: Context, peer: Peer) -> Iterator[Row]:
    slots = make_slots(config(context, "nccl"), torch.device("cuda:0"), 4)
    peer.hear()
    began = time.perf_counter()
    works: list[c10d.Work] = [peer.group.post(slots[number % 4]) for number in range(64)]
    for work in works:
        peer.group.wait(work, NEVER)
    peer.hear()
    rate = len(works) * slots[0].numel() / (time.perf_counter() - began)
    yield Row("nccl-pair", "payloads of 4 MiB", rate / 1e9, "GB/s", context.rates.copy_bytes / 2e9 or None)


def _serve(context: Context, group: Group, answers: "Connection[str, None]") -> None:
    slots = make_slots(config(context, "nccl"), torch.device("cuda:0"), 4)
    answers.send("ready")
    receive_all(context, group, slots, bare_bytes)
    answers.send("done")
