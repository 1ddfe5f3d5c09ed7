"""The keys and values of all sequences, in pages.

A page holds `page_tokens` consecutive tokens of one sequence for all layers and is one contiguous piece of memory, so
that it moves between processes as it lies. The forward pass writes a row's K and V (`Kernels.write_kv`), attention
reads them, `read_pages` and `write_pages` carry whole pages out and in. Which page belongs to whom is the scheduler's
business.

Inside a page, for each layer, K of every KV head, then V of every KV head. In which order, the device decides:

groups16  CPU: K as [head_dim][page_tokens], V as [page_tokens][head_dim], so that attention runs over neighbouring
          tokens for the scores and over neighbouring dimensions for the sum, always in groups of 16. In bfloat16 such a
          group lies as 0, 8, 1, 9, ... 7, 15: read as eight 32-bit words, the low halves are elements 0-7 and the high
          halves 8-15, and one shift or one mask makes fp32 of them.
rows      CUDA: both as [page_tokens][head_dim], tiles as matrix units take them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.cuda.copies import Copies
from engine.model_config import ModelConfig
from pdserve.errors import ConfigError
from pdserve.model_card import KvLayout

PAGE_TOKENS = 16
PAGE_FORMAT, ROWS_FORMAT = "groups16", "rows"  # KvLayout.page_format of the layouts above
GROUP = 16

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def page_format(device: torch.device) -> str:
    """Which of the two the kernels of a device work on."""
    return ROWS_FORMAT if device.type == "cuda" else PAGE_FORMAT


def kv_layout(model_config: ModelConfig, dtype: str, format_: str = PAGE_FORMAT) -> KvLayout:
    """How the pages of this model lie in memory."""
    return KvLayout(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        page_tokens=PAGE_TOKENS,
        dtype=dtype,
        page_format=format_,
    )


class KvCache:
    """Room for `num_pages` pages on one device."""

    def __init__(self, layout: KvLayout, num_pages: int, device: torch.device) -> None:
        """Raises ConfigError for a layout that the kernels cannot hold."""
        _check(layout)
        self.layout = layout
        self.num_pages = num_pages
        shape = (num_pages, layout.num_layers, 2, layout.num_kv_heads, layout.page_tokens * layout.head_dim)
        self.pages = torch.zeros(shape, dtype=_DTYPES[layout.dtype], device=device)
        self._copies = Copies(device, layout.num_layers) if device.type == "cuda" else None

    def written(self, layers: range) -> None:
        """A pass has just been told to write these layers: copies of what they hold from now on wait for it."""
        if self._copies is not None:
            self._copies.mark(layers)

    @property
    def is_synchronous(self) -> bool:
        """Whether a pass has written its pages when the call that runs it returns."""
        return self._copies is None

    def read_pages(self, page_ids: Sequence[int], out: Tensor, layers: range | None = None) -> int:
        """Copy pages, or some consecutive layers of them, into `out` (uint8, long enough); returns the bytes.

        They are complete on return. On CUDA `out` may be there or in pinned memory; it waits for the passes that wrote
        these layers (`written`), not for those that compute later ones meanwhile.
        """
        pages, payload = self._rows(page_ids, out, layers)
        if self._copies is not None:
            self._copies.gather(pages, page_ids, payload, layers.stop if layers else self.layout.num_layers)
        else:
            torch.index_select(pages, 0, torch.tensor(list(page_ids), dtype=torch.int64), out=payload)
        return payload.numel()

    def write_pages(self, page_ids: Sequence[int], src: Tensor, layers: range | None = None) -> None:
        """Copy pages from `src` (uint8), as `read_pages` wrote them; `src` is free again on return."""
        pages, payload = self._rows(page_ids, src, layers)
        if self._copies is not None:
            self._copies.scatter(pages, page_ids, payload)
            return
        for page_id, page in zip(page_ids, payload, strict=True):  # ten times the speed of index_copy_ of bytes
            pages[page_id].copy_(page)

    def _rows(self, page_ids: Sequence[int], payload: Tensor, layers: range | None) -> tuple[Tensor, Tensor]:
        """The layers of all pages, and the payload of some pages, as uint8 [pages, bytes]."""
        layers = layers if layers is not None else range(self.layout.num_layers)
        row_bytes = len(layers) * self.layout.layer_bytes
        num_bytes = len(page_ids) * row_bytes
        if payload.dtype != torch.uint8 or payload.numel() < num_bytes:
            found = f"{payload.numel()} of {payload.dtype}"
            raise ValueError(f"{len(page_ids)} pages need {num_bytes} bytes of uint8, got {found}")
        if not all(0 <= page_id < self.num_pages for page_id in page_ids):
            raise IndexError(f"page ids must be below {self.num_pages}, got {list(page_ids)}")
        if layers != range(self.layout.num_layers)[layers.start : layers.stop]:
            raise IndexError(f"layers must be consecutive and below {self.layout.num_layers}, got {layers}")
        start = layers.start * self.layout.layer_bytes
        rows = self.pages.view(self.num_pages, -1).view(torch.uint8)[:, start : start + row_bytes]
        return rows, payload[:num_bytes].view(-1, row_bytes)


def to_groups(x: Tensor) -> Tensor:
    """Order of elements inside a page: groups of 16 along the last dimension, those of bfloat16 in pairs."""
    if x.dtype != torch.bfloat16:
        return x
    return x.reshape(*x.shape[:-1], -1, 2, GROUP // 2).transpose(-1, -2).flatten(-3)


def from_groups(x: Tensor) -> Tensor:
    """Undo `to_groups`."""
    if x.dtype != torch.bfloat16:
        return x
    return x.reshape(*x.shape[:-1], -1, GROUP // 2, 2).transpose(-1, -2).flatten(-3)


def place_in_group(index: Tensor, dtype: torch.dtype) -> Tensor:
    """Where `to_groups` puts the elements with these indices."""
    if dtype != torch.bfloat16:
        return index
    return index // GROUP * GROUP + index % (GROUP // 2) * 2 + index % GROUP // (GROUP // 2)


def _check(layout: KvLayout) -> None:
    if layout.dtype not in _DTYPES:
        raise ConfigError(f"KV dtype must be one of {', '.join(_DTYPES)}, not {layout.dtype}")
    if layout.page_format not in (PAGE_FORMAT, ROWS_FORMAT):
        raise ConfigError(f"page format must be {PAGE_FORMAT} or {ROWS_FORMAT}, not {layout.page_format}")
    if layout.page_tokens % GROUP or layout.head_dim % GROUP:
        found = f"{layout.page_tokens} and {layout.head_dim}"
        raise ConfigError(f"page_tokens and head_dim must be multiples of {GROUP}, not {found}")
