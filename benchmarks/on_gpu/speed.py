"""Decode steps and prefills of a model with the shape of Llama 3.1 8B, beside what reading and multiplying take."""

import random
import time
from collections.abc import Iterator
from functools import partial
from statistics import median

from benchmarks.on_gpu.made import LLAMA_8B, Made
from benchmarks.on_gpu.report import Context, Row, ms, ratio_s
from engine.batch import Chunk
from engine.runner import Runner
from engine.sampler import Step, sample
from pdserve.request import Sampling, WorkRequest
from pdserve.speed import Work

CONTEXT = 1000  # tokens before the first measured step
STEPS = 24


def decode(context: Context) -> Iterator[Row]:
    """At several batch sizes; a step counts from the call to its logits, or to its tokens."""
    batches, length, steps = ((2,), 20, 1) if context.is_dry else ((1, 8, 32, 128), CONTEXT, STEPS)
    made = Made(context, LLAMA_8B, max(batches) * (length + 4 * steps + 16))
    for batch in batches:
        floor = _floor_ms(context, made.cost.decode(batch, length + steps))
        load = _Load(made, batch, length)
        for with_graphs in (True, False):
            runner = made.runner(with_graphs=with_graphs)
            times = load.steps_s(context, runner, steps, None)
            how = "CUDA graph" if with_graphs else "kernel by kernel"
            what = f"step, batch {batch}, {length} tokens of context, {how}"
            yield Row("decode", what, ms(median(times)), "ms", floor, f"at best {1000 * min(times):.2f}")
        for temperature in (0.0, 1.0):
            runner = made.runner(with_graphs=True)
            times = load.steps_s(context, runner, steps, Sampling(temperature=temperature, seed=1))
            what = f"the same with sampling, batch {batch}, temperature {temperature:g}"
            note = f"{batch / median(times):.0f} tokens/s"
            yield Row("decode", what, ms(median(times)), "ms", floor, note)


class _Load:
    """Sequences of one length, their pages anywhere in the cache."""

    def __init__(self, made: Made, batch: int, length: int) -> None:
        self._vocab_size, self._length = made.config.vocab_size, length
        page_ids = list(range(made.cache.num_pages))
        random.Random(batch).shuffle(page_ids)
        each = min(made.cache.num_pages // batch, made.cache.layout.pages_for(length + 4 * STEPS + 16))
        self._page_ids = [page_ids[index * each : (index + 1) * each] for index in range(batch)]

    def steps_s(self, context: Context, runner: Runner, count: int, sampling: Sampling | None) -> list[float]:
        """The times of so many steps, after some others."""
        times, prompt, warm_ups = [], tuple(range(8)), 1 if context.is_dry else 3
        for number in range(count + warm_ups):
            token_ids = [(index * 7 + number) % self._vocab_size for index in range(len(self._page_ids))]
            chunks = [
                Chunk([token_id], self._length + number, page_ids, sample=True)
                for token_id, page_ids in zip(token_ids, self._page_ids, strict=True)
            ]
            context.synchronize()
            began = time.perf_counter()
            logits = runner.run(chunks)
            if sampling is None:
                context.synchronize()
            else:
                request = WorkRequest("load", prompt, len(prompt), sampling, max_tokens=count + 4)
                sample(logits, [Step(request, number)] * len(chunks))
            times.append(time.perf_counter() - began)
        return times[warm_ups:]


def prefill(context: Context) -> Iterator[Row]:
    """Of one prompt, from the call to the logits of its last token."""
    lengths = (17,) if context.is_dry else (512, 2000, 8000)
    made = Made(context, LLAMA_8B, max(lengths))
    runner = made.runner()
    for length in lengths:
        chunk = Chunk([token % made.config.vocab_size for token in range(length)], 0, range(made.cache.num_pages), True)
        seconds = context.times_s(partial(runner.run, [chunk]), 5)
        began = time.perf_counter()
        runner.run([chunk])
        note = f"started from Python in {1000 * (time.perf_counter() - began):.1f} ms"
        floor = _floor_ms(context, made.cost.prefill(length))
        yield Row("prefill", f"{length} tokens", ms(median(seconds)), "ms", floor, note)


def _floor_ms(context: Context, work: Work) -> float | None:
    """The longer of reading and multiplying."""
    rates = context.rates
    read, product = ratio_s(work.read_bytes, rates.copy_bytes), ratio_s(work.flops, rates.flops)
    return None if read is None or product is None else 1000 * max(read, product)
