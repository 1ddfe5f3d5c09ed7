"""Decode steps as CUDA graphs: a step of a small model is a few hundred kernels, and starting each from Python costs
more than running it.

A graph repeats the very calls that it recorded, on the same memory. So each size has buffers of its own for the batch,
which are filled for every step, and sizes come in powers of two: of sequences, and of pages of the longest. Sequences
that fill a batch up have no row. A size is recorded when it first occurs.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, Chunk
from engine.kv_cache import KvCache
from engine.model import Model

MIN_PAGES = 16  # of the longest sequence


class Record(Protocol):
    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work, and return what repeats it."""


class StepGraphs:
    """One decode step of any size. One thread at a time may run it."""

    def __init__(self, model: Model, cache: KvCache, record: Record) -> None:
        self._model = model
        self._cache = cache
        self._record = record
        self._sizes: dict[tuple[int, int], _Size] = {}

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """fp32 [R, vocab] for chunks of one token each; good until the next call."""
        layout = self._cache.layout
        pages = max(layout.pages_for(chunk.start + 1) for chunk in chunks)
        key = _power_of_2(len(chunks)), max(_power_of_2(pages), MIN_PAGES)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size(self._model, self._cache, *key)
            size.fill(chunks)
            size.repeat = self._record(size.compute)
        else:
            size.fill(chunks)
            size.repeat()
        return size.logits[: len(chunks)]


class _Size:
    """The buffers of a number of sequences, of so many pages at most."""

    def __init__(self, model: Model, cache: KvCache, sequences: int, pages: int) -> None:
        self._model = model
        self._cache = cache
        device, self._page_tokens = cache.pages.device, cache.layout.page_tokens
        sizes = (2 * sequences, sequences, sequences + 1, sequences * pages)  # int32; token ids are twice as wide
        self._host = torch.zeros(sum(map(_aligned, sizes)), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host.to(device, copy=True)
        token_ids, positions, row_starts, page_table = _split(self._device, sizes)
        self._fields = [field.numpy() for field in _split(self._host, sizes)]
        self._batch = Batch(
            token_ids=token_ids.view(torch.int64),
            positions=positions,
            row_starts=row_starts,
            page_table=page_table.view(sequences, pages),
            sampled_rows=torch.arange(sequences, device=device),
            longest_chunk=1,
            longest_context=pages * self._page_tokens,
        )
        self.logits = torch.empty(0)
        self.repeat: Callable[[], None] = self.compute

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Bring a batch to the device; waits for that, so that the next one may follow at once."""
        token_ids, positions, row_starts, page_table = self._fields
        count = len(chunks)
        token_ids.view(np.int64)[:count] = [chunk.token_ids[0] for chunk in chunks]
        positions[:count] = [chunk.start for chunk in chunks]
        row_starts[:] = np.minimum(np.arange(len(row_starts)), count)
        self._fill_pages(page_table.reshape(self._batch.page_table.shape), chunks)
        self._device.copy_(self._host)

    def _fill_pages(self, table: NDArray[np.int32], chunks: Sequence[Chunk]) -> None:
        for row, chunk in zip(table, chunks, strict=False):  # what stands behind its last page nobody reads
            num_pages = chunk.start // self._page_tokens + 1
            row[:num_pages] = chunk.page_ids[:num_pages]

    def compute(self) -> None:
        """The step itself, from buffers to `logits`."""
        hidden = self._model.embed(self._batch)
        for layer in self._model.layers:
            hidden = layer(hidden, self._batch, self._cache)
        self.logits = self._model.head(hidden)


def _split(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    parts = buffer.split([_aligned(size) for size in sizes])
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _aligned(size: int) -> int:
    """16 bytes: Triton compiles anew for addresses that are not."""
    return -(-size // 4) * 4


def _power_of_2(number: int) -> int:
    """The next one."""
    return 1 << (number - 1).bit_length()


class CudaRecorder:
    """Records on CUDA. All graphs share their memory, as they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Record."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # kernels are compiled and libraries made ready outside of the recording
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of links may go on with the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        graph.replay()
        return graph.replay
