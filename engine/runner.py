"""One forward pass: chunks of sequences go in, logits come out, and their K and V are in the pages.

`progress` grows by one per layer. Another thread reads it to tell a slow forward from a stuck one.
A pass may be run in parts (`Forward`), so that finished layers can be pushed while the next ones are computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Batch, Chunk, build_batch
from engine.cuda.graphs import StepGraphs
from engine.floors import model_cost
from engine.kv_cache import KvCache
from engine.model import Model
from engine.tally import Tally
from pdserve.speed import Work


class Runner:
    """A model together with the pages that it works on. One thread at a time may run it."""

    def __init__(self, model: Model, cache: KvCache, graphs: StepGraphs | None = None) -> None:
        """`graphs`, of the same model and cache, compute decode steps."""
        self.progress = 0
        self.model = model
        self.cache = cache
        self.tally = Tally(len(model.layers))
        self._graphs = graphs
        self._cost = model_cost(model.config, cache.layout)

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """fp32 [R, vocab]: a row for each chunk that wants one, in their order; good until the next pass.

        Workers give only what is in range.
        """
        if self._graphs is not None and all(len(chunk.token_ids) == 1 and chunk.sample for chunk in chunks):
            return self._repeat(self._graphs, chunks)
        forward = self.start(chunks)
        forward.advance(len(self.model.layers))
        return forward.logits()

    def start(self, chunks: Sequence[Chunk]) -> "Forward":
        """The same in parts: the layers are computed as the caller asks for them."""
        for chunk in chunks:
            self._check(chunk)
        return Forward(self, build_batch(chunks, self.cache.pages.device), self._cost.of_chunks(chunks))

    def _repeat(self, graphs: StepGraphs, chunks: Sequence[Chunk]) -> Tensor:
        """A decode step in one go."""
        for chunk in chunks:
            self._check(chunk)
        logits, work, layers = graphs.run(chunks), self._cost.of_chunks(chunks), range(len(self.model.layers))
        self.cache.written(layers)
        for _ in layers:
            self.tally.layer_done(work)
        self.tally.pass_done(work)
        self.progress += len(layers)
        return logits

    def _check(self, chunk: Chunk) -> None:
        """A wrong number here would read or write foreign memory, so it is better to stop."""
        end, config = chunk.start + len(chunk.token_ids), self.model.config
        assert 0 <= chunk.start < end <= config.window, f"positions {chunk.start}..{end} of window {config.window}"
        assert 0 <= min(chunk.token_ids) <= max(chunk.token_ids) < config.vocab_size, "token id outside the vocabulary"
        pages = chunk.page_ids[: self.cache.layout.pages_for(end)]
        assert len(pages) == self.cache.layout.pages_for(end), f"{len(pages)} pages do not hold {end} tokens"
        assert 0 <= min(pages) <= max(pages) < self.cache.num_pages, "page outside the cache"


class Forward:
    """One pass under way. Its pages must stay, and no other pass may start, until it is complete or dropped."""

    @torch.inference_mode()
    def __init__(self, runner: Runner, batch: Batch, work: Work) -> None:
        self.num_layers = 0  # done: their K and V are in the pages, or on CUDA will be
        self.num_ready = 0  # of these: worth reading now, because no later ones would have to wait for that
        self._runner = runner
        self._batch = batch
        self._work = work
        self._hidden = runner.model.embed(batch)
        self._layer = runner.model.over(batch, runner.cache)

    @property
    def is_complete(self) -> bool:
        """Whether all layers are done."""
        return self.num_layers == len(self._runner.model.layers)

    @torch.inference_mode()
    def advance(self, num_layers: int) -> None:
        """Compute so many more layers, or as many as are left."""
        runner, before = self._runner, self.num_layers
        for index in range(before, min(before + num_layers, len(runner.model.layers))):
            self._hidden = self._layer(index, self._hidden)
            self.num_layers += 1
            runner.progress += 1
            runner.tally.layer_done(self._work)
        runner.cache.written(range(before, self.num_layers))
        self.num_ready = self.num_layers if runner.cache.is_synchronous else before
        if self.is_complete and before < self.num_layers:
            runner.tally.pass_done(self._work)

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return self._runner.model.config.vocab_size

    @torch.inference_mode()
    def logits_of(self, rows: slice) -> Tensor:
        """fp32 [rows, vocab] of any rows of the batch, once all layers are done."""
        assert self.is_complete
        self._runner.progress += 1
        return self._runner.model.head(self._hidden[rows])

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """fp32 [R, vocab], once all layers are done."""
        assert self.is_complete
        return self._runner.model.logits(self._hidden, self._batch)
