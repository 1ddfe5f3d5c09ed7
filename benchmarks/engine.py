"""Where each millisecond of a step goes: decode steps of a real decode worker and the passes of a prompt, in process.

    python -m benchmarks.engine [--model smollm2] [--batches 1 8 16] [--prompt 2000] [--out FILE.json]

Every routine is timed where the model calls it; what is left of a forward is Python, additions and the embedding.
Beside them stand the floors of the same run: bytes over the best of five read-sums, FLOPs over the best product. The
prompts' KV is zeros, which costs what any other does. Of every part the quickest of all steps, as floors are.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.stopwatch import LINEARS, Bench, Stopwatch, bench_of
from cluster.model_store import resolve
from decode_worker.commands import Decode, Landed, Reserve
from decode_worker.worker import DecodeWorker
from engine.batch import Chunk
from engine.floors import decode_floor, prefill_floor
from engine.load import EngineConfig
from engine.measure import Measured, measure
from engine.sampler import Step, sample
from pdserve.handover import PageRun
from pdserve.request import Incarnation, Sampling, Ticket, Token, WorkerId, WorkRequest
from pdserve.speed import Limits, Work

Parts = dict[str, float]  # milliseconds by what they went to
CHUNK_TOKENS = 256  # what a prefill worker computes at once, if not told otherwise
WARM_UP = 3
SAMPLINGS = {
    "sampling, greedy": Sampling(temperature=0.0),
    "sampling, T = 1": Sampling(temperature=1.0, seed=7),
    "sampling, T = 1, top-k 50, top-p 0.9": Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=7),
}


@dataclass(frozen=True)
class _Zeros:
    """A payload that has landed."""

    buffer: torch.Tensor

    def give_back(self) -> None:
        """Nobody waits for it."""


def decode_parts(bench: Bench, batch: int, context: int, steps: int) -> Parts:
    """A step of `batch` greedy requests of about `context` tokens each, all in one worker."""
    worker = DecodeWorker(bench.engine, WorkerId("decode-0"), Incarnation("bench"), max_batch=batch)
    vocab_size = bench.engine.card.vocab_size
    requests = [_request(row, context - steps // 2, steps + WARM_UP + 2, vocab_size) for row in range(batch)]
    _begin(worker, bench, requests)
    worker.step()
    rounds = [_round(worker, bench.watch, batch) for _ in range(WARM_UP + steps)][WARM_UP:]
    logits = torch.randn(batch, bench.engine.card.vocab_size) * 2
    parts = [_rest(each | _sampling(logits)) for each in rounds]
    return {name: min(each[name] for each in parts) for name in parts[0]}


def _round(worker: DecodeWorker, watch: Stopwatch, batch: int) -> Parts:
    watch.spent.clear()
    update = watch.timed("step", worker.step)()
    assert len(update.emitted) == batch
    return {name: 1000 * seconds for name, seconds in watch.spent.items()}


def _request(row: int, length: int, max_tokens: int, vocab_size: int) -> WorkRequest:
    token_ids = tuple((7919 * row + i) % vocab_size for i in range(length))
    return WorkRequest(f"row {row}", token_ids, length, SAMPLINGS["sampling, greedy"], max_tokens)


def _begin(worker: DecodeWorker, bench: Bench, requests: Sequence[WorkRequest]) -> None:
    """Reserve for all, then land zeros and adopt: no step before the last has come."""
    layout = bench.engine.card.kv_layout
    for request in requests:
        worker.submit(Reserve(0, 0, request, whole=True))
    tickets = [reserved.outcome for reserved in worker.step().reserved]
    for request, ticket in zip(requests, tickets, strict=True):
        assert isinstance(ticket, Ticket), ticket
        num_pages = layout.pages_for(len(request.token_ids))
        run = PageRun(ticket.counter, ticket.cached_pages, num_pages, 0, layout.num_layers)
        worker.submit(Landed(run, _Zeros(torch.zeros(num_pages * layout.page_bytes, dtype=torch.uint8))))
        worker.submit(Decode(0, ticket, Token(0, 9)))


def _sampling(logits: torch.Tensor) -> Parts:
    """Of all rows, by kind."""
    watch = Stopwatch()
    for name, sampling in SAMPLINGS.items():
        watch.timed(name, sample)(logits, [Step(WorkRequest("", (1,), 1, sampling, 2), 1) for _ in logits])
    return {name: 1000 * seconds for name, seconds in watch.spent.items()}


def _rest(parts: Parts) -> Parts:
    """What no kernel took of the forward, and what else there is of a step."""
    inside = sum(spent for name, spent in parts.items() if name not in ("step", "forward", *SAMPLINGS))
    parts["forward: Python, additions, embedding"] = parts["forward"] - inside
    if "step" in parts:
        parts["step without forward: greedy sampling, tickets"] = parts["step"] - parts["forward"]
    return parts


def prefill_parts(bench: Bench, num_tokens: int, repeats: int) -> Parts:
    """A prompt in chunks as a prefill worker computes it; of several the quickest."""
    return min((_prompt(bench, num_tokens) for _ in range(repeats)), key=lambda parts: parts["forward"])


def _prompt(bench: Bench, num_tokens: int) -> Parts:
    pages = range(bench.engine.card.kv_layout.pages_for(num_tokens))
    bench.watch.spent.clear()
    for start in range(0, num_tokens, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, num_tokens)
        token_ids = [7919 * i % bench.engine.card.vocab_size for i in range(start, end)]
        bench.engine.runner.run([Chunk(token_ids, start, pages, sample=end == num_tokens)])
    return _rest({name: 1000 * seconds for name, seconds in bench.watch.spent.items()})


def floors(bench: Bench, limits: Limits, spans: Sequence[tuple[int, int]]) -> Parts:
    """A linear layer: its weights read once, or its products; attention: KV read once, or its products; whichever takes
    longer. Of a pass over rows of several sequences: first position and number of rows of each."""
    cost, rows = bench.cost, sum(count for _, count in spans)
    whole, result = cost.work(spans, len(spans)), {}
    for (out, width), name in bench.linear_names.items():
        count = 1 if name == LINEARS[-1] else bench.engine.card.kv_layout.num_layers
        products = 2.0 * out * width * (len(spans) if name == LINEARS[-1] else rows)
        work = Work(flops=count * products, read_bytes=float(count * out * width * bench.weight_bytes))
        result[name] = 1000 * limits.floor_s(work)
        whole = Work(flops=whole.flops - work.flops, read_bytes=whole.read_bytes - work.read_bytes)
    return result | {"attention": 1000 * limits.floor_s(whole)}


def profile(bench: Bench, measured: Measured, given: argparse.Namespace) -> dict[str, Any]:
    """All of it; milliseconds."""
    columns = {}
    for batch in given.batches:
        whole = decode_floor(bench.cost, measured.limits, batch, given.context).floor_ms
        lower = floors(bench, measured.limits, [(given.context - 1, 1)] * batch) | {"forward": whole, "step": whole}
        parts = decode_parts(bench, batch, given.context, given.steps)
        columns[f"decode, {batch} x {given.context}"] = {"parts": parts, "floors": lower}
    if given.prompt:
        whole = prefill_floor(bench.cost, measured.limits, given.prompt).floor_ms
        lower = floors(bench, measured.limits, [(0, given.prompt)]) | {"forward": whole}
        columns[f"prefill, {given.prompt}"] = {"parts": prefill_parts(bench, given.prompt, 2), "floors": lower}
    rates = {"read GB/s": measured.read_bytes_per_s / 1e9}
    rates |= {f"{name} GFLOP/s": rate / 1e9 for name, rate in measured.flops_per_s.items()}
    return {"rates": rates, "columns": columns}


def table(result: dict[str, Any]) -> str:
    """One row per part, `measured / floor` in each column."""
    columns = result["columns"]
    names = dict.fromkeys(name for column in columns.values() for name in column["parts"])
    lines = [", ".join(f"{name} {rate:.1f}" for name, rate in result["rates"].items()), ""]
    lines += [f"| ms / floor | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        cells = (_cell(column["parts"].get(name), column["floors"].get(name)) for column in columns.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(spent: float | None, floor: float | None) -> str:
    if spent is None:
        return ""
    return f"{spent:,.2f}" if floor is None else f"{spent:,.2f} / {floor:,.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prefill; 0: none")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--by-call", action="store_true", help="layers not joined: each routine called from Python")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = EngineConfig(str(resolve(given.model).folder), "model", given.dtype)
    result = profile(bench_of(config, by_call=given.by_call), measure(config), given)
    print(table(result))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
