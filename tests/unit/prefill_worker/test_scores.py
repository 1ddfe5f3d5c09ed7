"""Prompt log-probabilities: those of transformers, the same bits in any chunks, and never from a cache."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import engine.logprobs
from engine.load import Engine
from pdserve.request import Scored
from tests.toy import toy_engine, write_toy_model
from tests.unit.prefill_worker.stand import Stand, prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def toy(folder: Path) -> Engine:
    return toy_engine(folder)


def scores_of(engine: Engine, lengths: Sequence[int], chunk_tokens: int = 64) -> list[list[Scored]]:
    """Prompts that are computed together, among one that asks for nothing."""
    stand = Stand(engine, chunk_tokens=chunk_tokens)
    stand.start(99, prompt(20, kind=99))
    for call, length in enumerate(lengths):
        stand.start(call, replace(prompt(length, kind=call), prompt_logprobs=5))
    stand.run()
    assert 99 not in stand.scored
    return [stand.scored[call] for call in range(len(lengths))]


def test_they_are_those_of_transformers(folder: Path, toy: Engine) -> None:
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lengths = [1, 2, 16, 17, 90]
    for call, scores in enumerate(scores_of(toy, lengths)):
        token_ids = prompt(lengths[call], kind=call).token_ids
        assert [score.chosen.token_id for score in scores] == list(token_ids[1:])
        with torch.inference_mode():
            expected = torch.log_softmax(reference(torch.tensor([token_ids])).logits[0].double(), -1)
        for score, row in zip(scores, expected, strict=False):
            assert score.chosen.logprob == pytest.approx(float(row[score.chosen.token_id]), abs=1e-3)
            assert [one.logprob for one in score.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
            assert [one.logprob for one in score.top] == pytest.approx(
                row[[one.token_id for one in score.top]].tolist(), abs=1e-3
            )


def test_chunks_and_neighbours_change_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [90, 33, 128, 7]
    whole = scores_of(toy_engine(folder), lengths, chunk_tokens=512)
    assert scores_of(toy_engine(folder), lengths, chunk_tokens=32) == whole
    monkeypatch.setattr(engine.logprobs, "_MOST_LOGITS", 512 * 3)  # three rows of logits at a time
    assert scores_of(toy_engine(folder), lengths) == whole


def test_a_cache_has_no_logits(toy: Engine) -> None:
    stand = Stand(toy)
    work = replace(prompt(100), prompt_logprobs=0)
    for call in range(2):
        stand.start(call, work)
        stand.run()
        assert len(stand.scored[call]) == 99
        assert (stand.sampled[call].computed_tokens, stand.sampled[call].cached_tokens) == (100, 0)
    assert stand.scored[0] == stand.scored[1]
    stand.start(2, prompt(100))  # what was computed for scores is found by others
    stand.run()
    assert stand.sampled[2].cached_tokens == 96
    stand.assert_clean()


def test_a_resumed_request_has_its_scores(toy: Engine) -> None:
    stand = Stand(toy)
    stand.start(0, replace(prompt(100, emitted=3), prompt_logprobs=2))
    stand.run()
    assert stand.scored[0] == []
    assert 0 in stand.sampled


def test_who_goes_away_amid_its_prompt_gets_nothing_more(toy: Engine) -> None:
    stand, work = Stand(toy), replace(prompt(200), prompt_logprobs=1)
    for cut in range(1, 12):
        stand.start(cut, work)
        for _ in range(random.Random(cut).randrange(10)):
            stand.step()
        stand.cancel(cut)
        stand.run()
    stand.assert_clean()
