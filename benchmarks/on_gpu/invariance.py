"""How often a token depends on the path: alone or in a batch, decoded or prefilled, whole or in chunks."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.on_gpu.made import SMALL, Made
from benchmarks.on_gpu.report import Context, Row
from engine.batch import Chunk
from engine.runner import Runner

PART = "invariance"


def rows(context: Context) -> Iterator[Row]:
    """Every path with the tokens that the first one chose."""
    lengths, count = ([5, 18], 2) if context.is_dry else ([40 + 8 * index for index in range(32)], 32)
    texts = _Texts(Made(context, SMALL, len(lengths) * (max(lengths) + count + 16)), lengths, count)
    alone = texts.decoded(size=1, with_graphs=False)
    paths: Mapping[str, Callable[[], Tensor]] = {
        "in a CUDA graph": lambda: texts.decoded(size=1, with_graphs=True),
        f"in batches of {len(lengths)}": lambda: texts.decoded(size=len(lengths), with_graphs=True),
        "prefilled whole": lambda: texts.prefilled(chunk=10**6),
        "prefilled in chunks of 64": lambda: texts.prefilled(chunk=64),
    }
    for name, path in paths.items():
        other = path()
        bits = (alone != other).flatten(0, -2).any(-1).float().mean()
        tokens = (alone.argmax(-1) != other.argmax(-1)).float().mean()
        note = f"{bits:.2%} of rows differ in some bit; logits by {float((alone - other).abs().max()):.2g} at most"
        what = f"share of greedy tokens that differ from those decoded alone: {name}"
        yield Row(PART, what, float(tokens), "", note=f"of {alone.shape[0] * alone.shape[1]}; {note}")


class _Texts:
    """Random prompts, and completions as the path that is run first chooses them."""

    def __init__(self, made: Made, lengths: Sequence[int], count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._made, self._count, self._lengths = made, count, lengths
        self._texts = [
            torch.randint(made.config.vocab_size, (length,), generator=generator).tolist() for length in lengths
        ]
        pages = made.cache.layout.pages_for(max(lengths) + count)
        self._page_ids = [range(index * pages, (index + 1) * pages) for index in range(len(lengths))]

    def decoded(self, size: int, *, with_graphs: bool) -> Tensor:
        """[texts, tokens, vocab] on the CPU: prompts one by one, then so many sequences at a time."""
        runner, found = self._made.runner(with_graphs=with_graphs), []
        for first in range(0, len(self._texts), size):
            found.append(self._decode(runner, range(first, min(first + size, len(self._texts)))))
        return torch.cat(found)

    def _decode(self, runner: Runner, group: range) -> Tensor:
        steps = [torch.cat([runner.run([self._chunk(index, 0, self._lengths[index])]).cpu() for index in group])]
        self._note(group, steps[-1], 0)
        for number in range(1, self._count):
            starts = [self._lengths[index] + number - 1 for index in group]
            chunks = [self._chunk(index, start, start + 1) for index, start in zip(group, starts, strict=True)]
            steps.append(runner.run(chunks).cpu().clone())
            self._note(group, steps[-1], number)
        return torch.stack(steps, 1)

    def _note(self, group: range, logits: Tensor, number: int) -> None:
        """The completion goes on with the first path's choice."""
        for index, row in zip(group, logits, strict=True):
            if len(self._texts[index]) == self._lengths[index] + number:
                self._texts[index].append(int(row.argmax()))

    def _chunk(self, index: int, start: int, end: int) -> Chunk:
        return Chunk(self._texts[index][start:end], start, self._page_ids[index], sample=True)

    def prefilled(self, chunk: int) -> Tensor:
        """The same rows from passes over the whole text."""
        return torch.stack([self._prefill(index, chunk) for index in range(len(self._texts))])

    def _prefill(self, index: int, chunk: int) -> Tensor:
        runner, end, rows = self._made.runner(), self._lengths[index] + self._count - 1, []
        for start in range(0, end, chunk):
            part = self._chunk(index, start, min(start + chunk, end))
            forward = runner.start([part])
            forward.advance(len(self._made.model.layers))
            rows.append(forward.logits_of(slice(0, len(part.token_ids))).cpu())
        return torch.cat(rows)[-self._count :]
