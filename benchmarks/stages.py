"""`make bench-stages`: the textbook's statements about prefill and decode, measured on a real cluster of one prefill
and one decode worker.

    python -m benchmarks.stages [--rounds 4] [--update docs/performance.md] [--again]

1. prompts of different lengths, few tokens out: time to first token, and per further token
2. one prompt length, different numbers of tokens out: time to first token, and in total
3. one step with the KV cache and without, in this process: without, the engine computes the whole sequence anew

Every round goes over the lengths in another random order, so that slow minutes of the machine fall on all of them;
long ones take part in every other round, as noise averages out in them. A result's life: measured ->
`benchmarks/results/stages.json` -> plots and a section of the document (`--again`: from that file). Nothing here is a
test of speed, but exact counts are asserted: decode steps, computed prompt tokens, equal logits.
"""

import argparse
import asyncio
import json
import platform
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import torch

from benchmarks.fits import Curve, Point
from benchmarks.load import Timed, closed_loop, request
from benchmarks.plots import plots
from benchmarks.run import cluster, machine, model_of
from benchmarks.statements import Result, section
from cluster.model_store import resolve as resolve_model
from cluster.plan import num_gpus
from cluster.worker_node import engine_config
from engine.batch import Chunk
from engine.floors import ModelCost, decode_floor, model_cost, prefill_floor
from engine.kv_cache import PAGE_TOKENS
from engine.load import Engine, load_engine
from engine.measure import measure as measure_machine
from pdserve.config import load_config, resolve
from pdserve.plain import from_plain, to_plain
from pdserve.speed import Limits
from pdserve.v1 import generation_pb2 as pb
from tests.chaos.table.document import update

RESULT = Path(__file__).parent / "results" / "stages.json"
MODEL = "smollm2"
WARM_UP_SEED = 10**6
STEPS = 12  # with the cache, for one without


@dataclass(frozen=True)
class Plan:
    """Lengths in tokens."""

    rounds: int = 4
    long_prompt: int = 1024  # more than that is in every other round
    long_output: int = 128
    prompts: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    prompt_completion: int = 32
    outputs: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    output_prompt: int = 256
    contexts: tuple[int, ...] = (64, 128, 256, 512, 1024)
    step_rounds: int = 3  # over the contexts


SMALL = Plan(
    rounds=1,
    prompts=(64, 128, 192),
    prompt_completion=4,
    outputs=(4, 8, 16),
    contexts=(64, 128, 192),
    step_rounds=1,
)


@dataclass(frozen=True)
class Floors:
    """What one worker cannot be quicker than, in milliseconds."""

    cost: ModelCost
    limits: Limits

    def prefill(self, num_tokens: int) -> float:
        """The first token of a prompt."""
        return prefill_floor(self.cost, self.limits, num_tokens).floor_ms

    def decode(self, context: int) -> float:
        """One further token."""
        return decode_floor(self.cost, self.limits, 1, context).floor_ms

    def answer(self, num_prompt: int, num_output: int) -> float:
        """All tokens."""
        steps = range(num_prompt + 1, num_prompt + num_output)
        return self.prefill(num_prompt) + sum(map(self.decode, steps))


Answers = Mapping[int, Sequence[Timed]]  # by length


def served(address: str, plan: Plan) -> tuple[Answers, Answers]:
    """Parts 1 and 2, one request at a time; no two prompts are alike."""
    seeds = count()
    prompts, outputs = order(plan.prompts, plan.long_prompt, plan), order(plan.outputs, plan.long_output, plan)
    by_prompt = [request(length, plan.prompt_completion, next(seeds)) for length in prompts]
    by_output = [request(plan.output_prompt, length, next(seeds)) for length in outputs]
    _ask(address, [request(plan.output_prompt, 8, WARM_UP_SEED)])  # a cold cluster's first request pays for more
    print(f"{len(prompts)} prompts of {plan.prompts} tokens, {plan.prompt_completion} out", flush=True)
    prompt_answers = _by_length(plan.prompts, prompts, _ask(address, by_prompt))
    print(f"{len(outputs)} prompts of {plan.output_prompt} tokens, {plan.outputs} out", flush=True)
    return prompt_answers, _by_length(plan.outputs, outputs, _ask(address, by_output))


def order(lengths: Sequence[int], long: int, plan: Plan) -> list[int]:
    """All rounds."""
    draw, result = random.Random(0), list[int]()
    for number in range(plan.rounds):
        now = [length for length in lengths if length <= long or number % 2 == 0]
        result += draw.sample(now, len(now))
    return result


def _ask(address: str, messages: list[pb.GenerateRequest]) -> list[Timed]:
    answers, _ = asyncio.run(closed_loop(address, messages, 1))
    for message, answer in zip(messages, answers, strict=True):
        check(len(message.token_ids.ids), answer.usage)
    return answers


def check(num_prompt: int, usage: pb.Usage) -> None:
    """Prefill computed the prompt, all of it and once; decode made every token but the first in a step of its own."""
    prompt = (usage.prompt_tokens, usage.prefill_tokens_computed, usage.cached_tokens, usage.resumes)
    assert prompt == (num_prompt, num_prompt, 0, 0), f"prompt of {num_prompt} tokens: {usage}"
    assert usage.decode_steps == usage.completion_tokens - 1, f"not a step per token: {usage}"


def _by_length(lengths: Sequence[int], asked: Sequence[int], answers: Sequence[Timed]) -> Answers:
    """The answers stand in the order in which they were asked for."""
    pairs = list(zip(asked, answers, strict=True))
    return {length: [answer for at, answer in pairs if at == length] for length in lengths}


@dataclass(frozen=True)
class StepTimes:
    """Of one context length, in milliseconds."""

    cached: tuple[float, ...]
    recomputed: tuple[float, ...]


def step_times(engine: Engine, contexts: Sequence[int], rounds: int) -> dict[int, StepTimes]:
    """Part 3. Asserts that the cache changes no logits where the engine is exact."""
    found = {context: StepTimes((), ()) for context in contexts}
    for _ in range(rounds):
        for context in contexts:
            cached, recomputed = _both_steps(engine, context)
            before = found[context]
            found[context] = StepTimes((*before.cached, *cached), (*before.recomputed, recomputed))
    return found


def _both_steps(engine: Engine, context: int) -> tuple[list[float], float]:
    """The step after `context` tokens, which are random: with what the cache holds of all but the newest, and without.

    The pass without is a prefill of the whole sequence, and leaves in the cache what the others read.
    """
    draw = random.Random(context)
    ids = [draw.randrange(engine.card.vocab_size) for _ in range(context)]
    pages = range(engine.card.kv_layout.pages_for(context))
    recomputed_ms, without = _timed_ms(engine, Chunk(ids, 0, pages, sample=True))
    newest = Chunk(ids[-1:], context - 1, pages, sample=True)
    steps = [_timed_ms(engine, newest) for _ in range(1 + STEPS)][1:]
    assert not engine.card.exact or all(torch.equal(logits, without) for _, logits in steps), "the cache changed logits"
    return [milliseconds for milliseconds, _ in steps], recomputed_ms


def _timed_ms(engine: Engine, chunk: Chunk) -> tuple[float, torch.Tensor]:
    began = time.perf_counter()
    logits = engine.runner.run([chunk]).cpu()
    return 1000 * (time.perf_counter() - began), logits.clone()


def measure(plan: Plan) -> Result:
    """Everything: the cluster first, then, when it is gone, the engine in this process."""
    config = resolve(load_config(None, {"model": MODEL}), num_gpus())
    settings = engine_config(config, str(resolve_model(MODEL).folder))
    before = measure_machine(settings).limits
    with cluster(["--model", MODEL]) as (address, _):
        model = model_of(address)
        answers = served(address, plan)
    after = measure_machine(settings).limits
    print(f"steps at {plan.contexts} tokens, with and without cache", flush=True)
    engine = load_engine(replace(settings, num_pages=-(-max(plan.contexts) // PAGE_TOKENS)))
    assert (model.dtype, model.fingerprint) == (engine.card.kv_layout.dtype, engine.card.fingerprint), "another model"
    steps = step_times(engine, plan.contexts, plan.step_rounds)
    cost = model_cost(engine.runner.model.config, engine.card.kv_layout)
    return result_of(plan, model, answers, steps, Floors(cost, best(before, after)))


def best(*tries: Limits) -> Limits:
    """A machine that others use as well allows at times less than it could."""
    return Limits(max(each.read_bytes_per_s for each in tries), max(each.flops_per_s for each in tries))


def result_of(
    plan: Plan, model: pb.Model, answers: tuple[Answers, Answers], steps: Mapping[int, StepTimes], floors: Floors
) -> Result:
    """Every time beside its floor."""
    by_prompt, by_output = answers
    mid, num_prompt = plan.prompt_completion // 2, plan.output_prompt
    return Result(
        where=f"{machine()}; Python {platform.python_version()}, torch {torch.__version__}",
        date=datetime.now(UTC).strftime("%d %b %Y"),
        model=f"{model.name}, {model.dtype}",
        is_exact=model.exact,
        rounds=plan.rounds,
        long_prompt=plan.long_prompt,
        long_output=plan.long_output,
        num_checked=sum(map(len, (*by_prompt.values(), *by_output.values()))),
        prompt_ttft=_curve((n, [e.ttft_s for e in by_prompt[n]], floors.prefill(n)) for n in plan.prompts),
        prompt_tpot=_curve((n, [e.tpot_s for e in by_prompt[n]], floors.decode(n + mid)) for n in plan.prompts),
        prompt_second=_curve((n, [e.exposed_s for e in by_prompt[n]], floors.decode(n + 1)) for n in plan.prompts),
        output_total=_curve((n, [e.total_s for e in by_output[n]], floors.answer(num_prompt, n)) for n in plan.outputs),
        output_ttft=_curve((n, [e.ttft_s for e in by_output[n]], floors.prefill(num_prompt)) for n in plan.outputs),
        cached_step=tuple(Point(n, steps[n].cached, floors.decode(n)) for n in plan.contexts),
        recomputed_step=tuple(Point(n, steps[n].recomputed, floors.prefill(n)) for n in plan.contexts),
        prompt_completion=plan.prompt_completion,
        output_prompt=plan.output_prompt,
    )


def _curve(found: Iterable[tuple[int, Sequence[float], float]]) -> Curve:
    """Of length, seconds, and the floor in milliseconds."""
    return tuple(Point(at, tuple(1000 * each for each in seconds), floor) for at, seconds, floor in found)


def publish(result: Result, drawn: Mapping[str, str], document: Path) -> None:
    """Plots into plots/ beside the document, and the section between its marks."""
    folder = document.parent / "plots"
    folder.mkdir(exist_ok=True)
    for name, svg in drawn.items():
        (folder / name).write_text(svg)
    update(document, "stages", section(result, [f"{folder.name}/{name}" for name in drawn]), "make bench-stages")


def main() -> None:
    """Measure, or read what was measured; print; publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="over all lengths, an even number")
    parser.add_argument("--small", action="store_true", help="few short lengths once, to see that it runs")
    parser.add_argument("--again", action="store_true", help="measure nothing: read the file of results")
    parser.add_argument("--out", type=Path, default=RESULT, help="the file of results; not written with --small")
    parser.add_argument("--update", type=Path, help="also put section and plots in their place in this document")
    arguments, began = parser.parse_args(), time.perf_counter()
    if arguments.again:
        result = from_plain(Result, json.loads(arguments.out.read_text()))
    else:
        result = measure(SMALL if arguments.small else Plan(arguments.rounds))
        print(f"{time.perf_counter() - began:.0f} s\n")
    if not (arguments.again or arguments.small):
        arguments.out.write_text(json.dumps(to_plain(result), indent=1) + "\n")
    drawn = plots(result)
    print(section(result, list(drawn)))
    if arguments.update:
        publish(result, drawn, arguments.update)


if __name__ == "__main__":
    main()
