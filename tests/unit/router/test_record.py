"""Usage and stage times, computed from what was written down."""

import pytest

from pdserve.membership import WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId
from router.record import RequestRecord

CARD = ModelCard("toy", 512, 64, (2,), "f", KvLayout(1, 1, 8, 16, "float32", "plain"), exact=True)


def worker(role: str, pid: int) -> WorkerInfo:
    return WorkerInfo(
        WorkerId(f"{role}-0"), "prefill" if role == "prefill" else "decode", Incarnation("i"), "h:1", pid, CARD
    )


def test_a_full_walk() -> None:
    record = RequestRecord(arrived=10.0, prompt_tokens=7, chosen=10.5, computed_tokens=3, cached_tokens=4)
    record.add_token(11.0)
    record.kv_arrived = 11.25
    for now in (11.5, 11.75, 12.0):
        record.add_token(now)
    record.finished, record.decode_steps, record.kv_bytes = 12.25, 3, 999
    record.prefill, record.decode = worker("prefill", 41), worker("decode", 42)
    times = record.timings()
    assert (times.queue_ms, times.prefill_ms, times.transfer_ms, times.first_decode_ms) == (500, 500, 250, 250)
    assert (times.ttft_ms, times.second_token_ms, times.total_ms) == (1000, 1500, 2250)
    assert times.tpot_ms == pytest.approx(1000 / 3)
    usage = record.usage()
    assert (usage.prompt_tokens, usage.cached_tokens, usage.prefill_tokens_computed) == (7, 4, 3)
    assert (usage.completion_tokens, usage.decode_steps) == (4, 3)
    workers = record.workers()
    assert (workers.prefill, workers.prefill_pid) == ("prefill-0", 41)
    assert (workers.decode, workers.decode_pid) == ("decode-0", 42)
    assert workers.transfer_bytes == 999


def test_what_did_not_happen_took_no_time() -> None:
    record = RequestRecord(arrived=10.0)
    times = record.timings()
    assert [value for _, value in times.ListFields()] == []
    record.chosen = 10.5
    record.add_token(11.0)
    record.finished = 11.0
    times = record.timings()
    assert (times.transfer_ms, times.first_decode_ms, times.second_token_ms, times.tpot_ms) == (0, 0, 0, 0)
    assert (times.prefill_ms, times.total_ms) == (500, 1000)
    assert (record.workers().decode, record.workers().prefill) == ("", "")


def test_stages_that_overlap_are_never_negative() -> None:
    record = RequestRecord(arrived=0.0, chosen=0.0, kv_arrived=0.5)
    record.add_token(1.0)
    assert record.timings().transfer_ms == 0
