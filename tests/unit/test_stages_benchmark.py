"""`make bench-stages` without its five minutes: fits, verdicts, plots and the section on made-up results; the two kinds
of step on a toy model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from torch import Tensor

from benchmarks import stages
from benchmarks.fits import Curve, Point, exponent, line, line_of, ratio
from benchmarks.plots import plots
from benchmarks.statements import BUT_FOR_KV, FAILS, HOLDS, Result, section, statements
from engine.batch import Chunk
from engine.load import Engine
from engine.runner import Runner
from pdserve.plain import from_plain, to_plain
from pdserve.speed import Limits
from pdserve.v1 import generation_pb2 as pb
from tests.toy import toy_engine, write_toy_model

LENGTHS = (64, 256, 1024)
MARKS = "before\n<!-- stages: made by make bench-stages -->\n<!-- stages: end -->\nafter\n"


def curve(ms: Callable[[int], float], floor: Callable[[int], float]) -> Curve:
    return tuple(Point(n, (0.9 * ms(n), ms(n), 1.2 * ms(n)), floor(n)) for n in LENGTHS)


def made_up() -> Result:
    """As the textbook has it."""
    prefill = curve(lambda n: 4.0 * n, lambda n: 3.0 * n)
    step = curve(lambda n: 35 + n / 1000, lambda n: 25 + n / 1000)
    return Result(
        where="a machine",
        date="01 Dec 2026",
        model="smollm2, bfloat16",
        is_exact=True,
        rounds=4,
        long_prompt=1024,
        long_output=128,
        num_checked=39,
        prompt_ttft=prefill,
        prompt_tpot=curve(lambda n: 35 + n / 20, lambda n: 25 + n / 30),
        prompt_second=curve(lambda n: 45 + n / 20, lambda n: 25 + n / 30),
        output_total=curve(lambda n: 1000 + 35 * n, lambda n: 800 + 25 * n),
        output_ttft=curve(lambda n: 1000, lambda n: 800),
        cached_step=step,
        recomputed_step=prefill,
        prompt_completion=32,
        output_prompt=256,
    )


def test_fits_find_what_was_put_in() -> None:
    assert exponent(LENGTHS, [3e-4 * n**2 for n in LENGTHS]) == pytest.approx(2)
    assert exponent(LENGTHS, [7.0] * 3) == pytest.approx(0)
    fit = line_of(curve(lambda n: 1000 + 35 * n, lambda n: 1))
    assert (fit.start, fit.slope, fit.r2, fit.at(10)) == pytest.approx((1000, 35, 1, 1350))
    assert line(LENGTHS, [n**3 for n in LENGTHS]).r2 < 0.98
    assert line(LENGTHS, [900.0] * 3).r2 == 1
    assert ratio([30.0, 45.0, 40.0]) == 1.5


def test_a_point_is_its_median() -> None:
    point = Point(64, (10.0, 100.0, 20.0, 21.0), 5.0)
    assert point.median == 20.5
    assert point.spread == pytest.approx(90 / 20.5)


def test_verdicts_of_a_textbook_machine() -> None:
    assert [each.verdict for each in statements(made_up())] == [HOLDS, BUT_FOR_KV, HOLDS, HOLDS, HOLDS, HOLDS]


def test_results_without_a_second_token_have_no_such_column() -> None:
    text = section(replace(made_up(), prompt_second=()), ["a", "b", "c"])
    assert "| 256 | 1,024 [922..1,229] | 768 | 47.8 [43.0..57.4] | 33.5 |" in text.splitlines()


def test_noise_is_no_rise() -> None:
    noisy = tuple(Point(at, (ms,), 800.0) for at, ms in ((16, 900.0), (32, 1200.0), (256, 950.0), (512, 1100.0)))
    said = statements(replace(made_up(), output_ttft=noisy))[3]
    assert said.verdict == HOLDS
    assert said.found.endswith("greatest over least median 1.33")


@pytest.mark.parametrize(
    ("field", "number", "ms"),
    [
        ("prompt_ttft", 0, lambda n: 4.0 * n**1.3),
        ("prompt_tpot", 1, lambda n: 35 + n / 5),
        ("output_total", 2, lambda n: 1000 + n**3),
        ("output_ttft", 3, lambda n: 1000 + n),
        ("output_ttft", 3, lambda n: 3000 - n),
        ("cached_step", 4, lambda n: 35 + n / 20),
        ("recomputed_step", 5, lambda n: 4.0 * n**2),
    ],
)
def test_verdicts_of_another_machine(field: str, number: int, ms: Callable[[int], float]) -> None:
    result = made_up()
    floors: Curve = getattr(result, field)
    changes: Any = {field: tuple(Point(n, (ms(n),), point.floor) for n, point in zip(LENGTHS, floors, strict=True))}
    verdicts = [each.verdict for each in statements(replace(result, **changes))]
    assert verdicts[number] == FAILS
    assert FAILS not in verdicts[:number] + verdicts[number + 1 :]


def test_the_section_has_every_number_and_plot() -> None:
    text = section(made_up(), ["plots/a.svg", "plots/b.svg", "plots/c.svg"])
    lines = text.splitlines()
    assert "| 256 | 1,024 [922..1,229] | 768 | 47.8 [43.0..57.4] | 33.5 | 57.8 [52.0..69.4] | 33.5 |" in lines
    assert "| 1,024 | 36,840 [33,156..44,208] | 26,400 | 1,000 [900..1,200] | 800 |" in lines
    assert [f"(plots/{name}.svg)" in text for name in "abc"] == [True] * 3
    assert "1,000 ms + 35.0 ms per token, R^2 1.0000" in text
    assert "At 1,024 tokens the cache makes a step 114 times as fast, and its logits are the same bits; medians" in text


def test_results_survive_their_file() -> None:
    assert from_plain(Result, json.loads(json.dumps(to_plain(made_up())))) == made_up()


def test_plots_are_small_the_same_every_time_and_have_their_own_background() -> None:
    drawn = plots(made_up())
    assert list(drawn) == ["stages-prompt.svg", "stages-output.svg", "stages-cache.svg"]
    assert plots(made_up()) == drawn
    for svg in drawn.values():
        ElementTree.fromstring(svg)
        assert len(svg) < 60_000
        assert "#ffffff" in svg
        assert "date" not in svg
    assert ">1,024<" in drawn["stages-prompt.svg"]
    assert drawn["stages-output.svg"].count(">floor, ") == 2


def test_publishing_twice_changes_nothing(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(MARKS)
    drawn = {"a.svg": "<svg>a</svg>", "b.svg": "<svg>b</svg>", "c.svg": "<svg>c</svg>"}
    stages.publish(made_up(), drawn, document)
    once = document.read_text()
    assert once.startswith("before\n")
    assert once.endswith("<!-- stages: end -->\nafter\n")
    assert "(plots/c.svg)" in once
    assert {path.name: path.read_text() for path in (tmp_path / "plots").iterdir()} == drawn
    stages.publish(made_up(), drawn, document)
    assert document.read_text() == once
    document.write_text("no marks")
    with pytest.raises(ValueError, match="expected the lines"):
        stages.publish(made_up(), drawn, document)


def test_every_round_has_another_order_and_every_other_one_the_long_lengths() -> None:
    plan = stages.Plan(rounds=3)
    order = stages.order((1, 2, 3, 4, 5), 3, plan)
    rounds = [order[:5], order[5:8], order[8:]]
    assert [sorted(each) for each in rounds] == [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 4, 5]]
    assert rounds[0] != rounds[2]
    assert stages.order((1, 2, 3, 4, 5), 3, plan) == order


def test_the_best_of_two_measurements_counts() -> None:
    assert stages.best(Limits(9e9, 8e10), Limits(1e10, 7e10)) == Limits(1e10, 8e10)


def test_counts_must_be_exact() -> None:
    right = {"prompt_tokens": 64, "prefill_tokens_computed": 64, "completion_tokens": 32, "decode_steps": 31}
    stages.check(64, pb.Usage(**right))
    for wrong in ({"decode_steps": 32}, {"cached_tokens": 16}, {"prefill_tokens_computed": 48}, {"resumes": 1}):
        with pytest.raises(AssertionError):
            stages.check(64, pb.Usage(**right | wrong))


def test_steps_with_and_without_cache(tmp_path: Path) -> None:
    engine = toy_engine(write_toy_model(tmp_path))
    times = stages.step_times(engine, (1, 16, 33), rounds=2)
    assert list(times) == [1, 16, 33]
    assert all((len(each.cached), len(each.recomputed)) == (2 * stages.STEPS, 2) for each in times.values())


class Forgetful(Runner):
    """Starts every pass with an empty cache."""

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        self.cache.pages.zero_()
        return super().run(chunks)


def test_a_cache_that_changes_logits_is_noticed(tmp_path: Path) -> None:
    engine: Engine = toy_engine(write_toy_model(tmp_path))
    assert engine.card.exact
    with pytest.raises(AssertionError, match="the cache changed logits"):
        stages.step_times(replace(engine, runner=Forgetful(engine.runner.model, engine.cache)), (33,), rounds=1)
