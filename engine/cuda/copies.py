"""Pages out of and into a cache on CUDA, on streams of their own.

A pass is queued on the main stream layer by layer and marks with an event what it has queued. Pages are gathered on a
side stream that waits for the mark of their last layer alone, while the main stream computes the layers behind it. The
host waits for a copy's end, because a payload must be complete before it is announced.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Copies:
    """Belongs to the thread that runs the passes."""

    def __init__(self, device: torch.device, num_layers: int) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._marks: list[torch.cuda.Event | None] = [None] * num_layers  # of the newest pass over each layer

    def mark(self, layers: range) -> None:
        """The main stream has been told to write these layers."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._marks[layers.start : layers.stop] = [event] * len(layers)

    def gather(self, pages: Tensor, page_ids: Sequence[int], payload: Tensor, end_layer: int) -> None:
        """The rows of these pages, uint8 [pages, bytes], into the payload, on the device or in pinned memory."""
        if (mark := self._marks[end_layer - 1]) is not None:
            self._side.wait_event(mark)
        else:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            index = torch.tensor(list(page_ids), dtype=torch.int64).to(self._device)
            rows = _words(pages).index_select(0, index)
            _words(payload).copy_(rows, non_blocking=True)
        self._side.synchronize()

    def scatter(self, pages: Tensor, page_ids: Sequence[int], payload: Tensor) -> None:
        """The payload into the rows of these pages, before what the main stream is told next."""
        main = torch.cuda.current_stream(self._device)
        index = torch.tensor(list(page_ids), dtype=torch.int64).to(self._device)
        _words(pages).index_copy_(0, index, _words(payload).to(self._device, non_blocking=True))
        main.synchronize()


def _words(rows: Tensor) -> Tensor:
    """Eight bytes at a time."""
    return rows.view(torch.int64)
