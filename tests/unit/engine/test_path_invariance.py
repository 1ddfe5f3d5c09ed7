"""A token's KV and logits do not depend, in any bit, on batch, chunking, or who computed them: design section 5.

Every sequence is computed alone and whole first. Then the same sequences go through the model together, their prompts
cut by a budget, decode steps of some beside prompt chunks of others, as continuous batching does; and once more with
the generated tokens replayed as if they were prompt, as a resume does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from engine.batch import Chunk
from engine.kernels import choose_kernels
from engine.kv_cache import KvCache
from engine.load import Engine
from engine.runner import Runner
from tests.short_model import write_short_model
from tests.toy import toy_engine, write_toy_model
from tests.toy_families import FAMILIES

CPU = torch.device("cpu")
LENGTHS = (1, 15, 16, 17, 255, 300)
LONG = 2000
BATCH = 33
NUM_GENERATED = 4

pytestmark = pytest.mark.skipif(not choose_kernels(CPU).exact, reason="no C compiler: torch kernels are not exact")


@dataclass
class Running:
    """A prompt with what is to be generated after it, and where the computation stands."""

    token_ids: list[int]
    prompt_length: int
    page_ids: range
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)  # after the prompt and after every generated token

    def next_chunk(self, budget: int) -> Chunk:
        """The next piece of the prompt, or one generated token."""
        end = min(self.prompt_length, self.done + budget) if self.done < self.prompt_length else self.done + 1
        return Chunk(self.token_ids[self.done : end], self.done, self.page_ids, sample=end >= self.prompt_length)

    @property
    def finished(self) -> bool:
        return self.done == len(self.token_ids)


@dataclass(frozen=True)
class Outcome:
    pages: Tensor  # uint8: all pages of the sequence
    logits: Tensor  # [1 + NUM_GENERATED, vocab]


def make_sequences(engine: Engine, lengths: Sequence[int]) -> list[Running]:
    sequences, first_page = [], 0
    for index, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * index + length)
        token_ids = torch.randint(engine.card.vocab_size, (length + NUM_GENERATED,), generator=generator).tolist()
        num_pages = engine.card.kv_layout.pages_for(len(token_ids))
        sequences.append(Running(token_ids, length, range(first_page, first_page + num_pages)))
        first_page += num_pages
    return sequences


def compute(engine: Engine, sequences: Sequence[Running], budget: int) -> list[Outcome]:
    """All sequences together, at most `budget` prompt tokens in a forward."""
    layout = engine.card.kv_layout
    cache = KvCache(layout, max(sequence.page_ids.stop for sequence in sequences), CPU)
    runner = Runner(engine.runner.model, cache)
    while not all(sequence.finished for sequence in sequences):
        forward(runner, [sequence for sequence in sequences if not sequence.finished], budget)
    outcomes = []
    for sequence in sequences:
        pages = torch.empty(len(sequence.page_ids) * layout.page_bytes, dtype=torch.uint8)
        cache.read_pages(sequence.page_ids, pages)
        outcomes.append(Outcome(pages, torch.stack(sequence.logits)))
    return outcomes


def forward(runner: Runner, sequences: Sequence[Running], budget: int) -> None:
    """One step of continuous batching: every decoding sequence, and prompts as far as the budget goes."""
    left, running = budget, []
    for sequence in sequences:
        if sequence.done < sequence.prompt_length and not left:
            continue
        chunk = sequence.next_chunk(left)
        left -= len(chunk.token_ids) if sequence.done < sequence.prompt_length else 0
        running.append((sequence, chunk))
    logits = iter(runner.run([chunk for _, chunk in running]))
    for sequence, chunk in running:
        sequence.done += len(chunk.token_ids)
        if chunk.sample:
            sequence.logits.append(next(logits))


def alone(engine: Engine, lengths: Sequence[int]) -> list[Outcome]:
    return [compute(engine, [sequence], 100_000)[0] for sequence in make_sequences(engine, lengths)]


def assert_same_bits(found: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one.pages, other.pages), f"KV of sequence {index}"
        assert torch.equal(one.logits.view(torch.int32), other.logits.view(torch.int32)), f"logits of sequence {index}"


def check_all_paths(engine: Engine, budgets: Sequence[int]) -> None:
    """Batches of 33 (under each budget), 8 and 1, and a replay, against each sequence alone."""
    others = (1 + 3 * index % 29 for index in range(BATCH - len(LENGTHS) - 1))
    lengths = (*LENGTHS, *others, LONG)
    expected = alone(engine, lengths)
    for budget in budgets:
        assert_same_bits(compute(engine, make_sequences(engine, lengths), budget), expected)
    assert_same_bits(compute(engine, make_sequences(engine, lengths)[:8], budgets[0]), expected[:8])
    assert_same_bits(compute(engine, make_sequences(engine, lengths)[5:6], budgets[0]), expected[5:6])
    check_replay(engine, make_sequences(engine, lengths)[:6], expected)


def check_replay(engine: Engine, sequences: Sequence[Running], expected: Sequence[Outcome]) -> None:
    """Prompt and generated tokens as one prompt: the KV and the last logits are those of decode."""
    for sequence in sequences:
        sequence.prompt_length = len(sequence.token_ids)
    for one, other in zip(compute(engine, sequences, 100_000), expected, strict=False):
        assert torch.equal(one.pages, other.pages)
        assert torch.equal(one.logits[-1].view(torch.int32), other.logits[-1].view(torch.int32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_toy_model(tmp_path: Path, dtype: Literal["bfloat16", "float32"]) -> None:
    check_all_paths(toy_engine(write_toy_model(tmp_path, max_position_embeddings=2048), dtype), (16, 100, 512))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("Llama, ")])
def test_every_family(tmp_path: Path, family: str, dtype: Literal["bfloat16", "float32"]) -> None:
    """Prompts around pages, blocks and sliding windows."""
    lengths = (1, 16, 130, 2, 23, 24, 25, 40, 41, 63, 64, 65, 200)
    engine = toy_engine(write_toy_model(tmp_path, **FAMILIES[family]), dtype)
    assert engine.card.exact
    expected = alone(engine, lengths)
    for budget in (11, 70):
        assert_same_bits(compute(engine, make_sequences(engine, lengths), budget), expected)
    check_replay(engine, make_sequences(engine, lengths), expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_smollm2(smollm2_folder: Path, tmp_path: Path, dtype: Literal["bfloat16", "float32"]) -> None:
    """Real shapes and weights; the whole model goes through the whole cluster in tests/e2e/test_smollm2.py."""
    folder = write_short_model(smollm2_folder, tmp_path / "short", num_layers=4)
    check_all_paths(toy_engine(folder, dtype), (64, 200, 1024))


def test_a_different_token_is_noticed(tmp_path: Path) -> None:
    engine = toy_engine(write_toy_model(tmp_path))
    expected = alone(engine, (30, 40))
    sequences = make_sequences(engine, (30, 40))
    sequences[1].token_ids[20] ^= 1
    with pytest.raises(AssertionError, match="KV of sequence 1"):
        assert_same_bits(compute(engine, sequences, 16), expected)
