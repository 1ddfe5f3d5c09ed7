"""`pdserve doctor`: what it is asked, what it finds, what it prints; a router of canned answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster import doctor as module
from cluster.doctor import doctor, examine
from cluster.doctor_report import report
from cluster.flags import DoctorFlags
from cluster.machine import Rate, machine
from decode_worker.capacity import capacity
from engine.config_file import read_config
from engine.kv_cache import kv_layout
from pdserve import rpc
from pdserve.errors import ConfigError, Unavailable
from pdserve.v1 import cluster_pb2 as cpb
from pdserve.v1 import cluster_pb2_grpc, generation_pb2_grpc
from pdserve.v1 import generation_pb2 as pb
from tests.toy import toy_config_json


def with_sheet(**flags: Any) -> DoctorFlags:
    """The flags, with an H100's data sheet (SXM, dense bfloat16)."""
    return DoctorFlags(**({"read_gb_s": 3350.0, "tflops": 989.0} | flags))


def write_config(folder: Path, **changes: object) -> str:
    (folder / "config.json").write_text(json.dumps(toy_config_json(**changes)))
    return str(folder)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """Llama 3 8B: a config.json and no weights."""
    return write_config(
        tmp_path, vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=None,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip


@pytest.fixture
def toy(tmp_path: Path) -> str:
    return write_config(tmp_path)


def test_the_textbook_figures_from_a_data_sheet(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = with_sheet(model=llama, memory_gb=80, prompt_tokens=2000, completion_tokens=128, json=True)
    doctor(flags)
    found = json.loads(capsys.readouterr().out)
    (prefill,) = (each for each in found["prefill"] if each["tokens"] == 2000)
    assert (round(prefill["textbook_ms"], 1), round(prefill["floor_ms"], 1)) == (32.5, 29.3)
    assert [each["batch"] for each in found["decode"]] == [1, 8, 16, 32]
    assert round(found["decode"][0]["textbook_ms"], 1) == 4.8
    room, model = found["room"], found["model"]
    assert room["pages"] == [(80_000_000_000 - 16_060_522_496) // (16 * model["kv_token_bytes"])]
    assert room["admitted"] == (room["pages"][0] - room["pages"][0] // 50) // 129
    assert found["workers"] is None


def test_a_person_reads_tables(llama: str) -> None:
    text = report(examine(with_sheet(model=llama, memory_gb=80)))
    assert "8,030.3 M parameters, 16.06 GB in bfloat16" in text
    assert "KV is 131,072 bytes per token" in text
    assert ["2000", "28,967", "29.3", "32.5"] in [line.split() for line in text.splitlines()]
    assert "989.00 TFLOP/s  given" in text


def test_prompts_that_the_model_cannot_take_have_no_floor(toy: str) -> None:
    found = examine(with_sheet(model=toy, prompt_tokens=300, num_pages=50, decode=2, dtype="float32"))
    assert [each.tokens for each in found.prefill] == [128, 300, 512]
    layout = kv_layout(read_config(Path(toy)), "float32")
    assert (found.room.pages, found.room.admitted) == ((50, 50), 2 * capacity(layout, 50, 300, 128).admitted)
    assert found.model.dtype == "float32"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_tokens": 500}, r"500 \+ 128 exceed the window of 512"),
        ({"memory_gb": 0.0001}, "memory_gb: "),
        ({"dtype": "float16"}, "float16"),
        ({"model": "/none.gguf"}, "none.gguf"),
    ],
)
def test_what_cannot_be_is_refused(toy: str, wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        examine(with_sheet(**({"model": toy} | wrong)))


def test_what_does_not_fit_is_said(toy: str) -> None:
    assert "do not fit" in report(examine(with_sheet(model=toy, num_pages=10)))


def test_only_what_is_not_given_is_looked_for() -> None:
    rates = [Rate("read", 5e9, "B/s", "x"), Rate("copy", 9e9, "B/s", "x")]
    rates += [Rate("slow", 1e9, "FLOP/s", "x"), Rate("fast", 2e9, "FLOP/s", "x")]
    assert machine(None, None, lambda: rates).limits.read_bytes_per_s == 5e9
    assert machine(None, None, lambda: rates).limits.flops_per_s == 2e9
    half = machine(7.0, None, lambda: rates)
    assert (half.limits.read_bytes_per_s, half.limits.flops_per_s) == (7e9, 2e9)
    assert [each.what for each in half.rates] == ["read", "slow", "fast"]
    assert machine(None, 3.0, lambda: rates).limits.flops_per_s == 3e12

    def never() -> list[Rate]:
        raise AssertionError

    assert len(machine(1.0, 1.0, never).rates) == 2


class Router(generation_pb2_grpc.GenerationServiceServicer, cluster_pb2_grpc.ClusterServiceServicer):
    """A toy model on one prefill worker and two decode workers, of which the second does nothing."""

    limits = cpb.Limits(read_bytes_per_s=10e9, flops_per_s=100e9)
    model = pb.Model(name="mine", vocab_size=512, context_window=512, dtype="float32")

    async def GetModel(self, request, context):  # type: ignore[no-untyped-def]
        return pb.GetModelResponse(model=self.model)

    async def GetStatus(self, request, context):  # type: ignore[no-untyped-def]
        recent = cpb.Work(clock_s=5, busy_s=2, passes=10, tokens=1000, flops=50e9, read_bytes=1e9)
        prefill = cpb.WorkerStatus(id="prefill-0", role="prefill", recent=recent, limits=self.limits)
        long = cpb.Work(clock_s=5, busy_s=5, flops=10e9, read_bytes=5e9)  # in the middle of its first pass
        decodes = [
            cpb.WorkerStatus(id="decode-0", role="decode", limits=self.limits, pages=cpb.Pages(total=40), recent=long),
            cpb.WorkerStatus(id="decode-1", role="decode", limits=self.limits, pages=cpb.Pages(total=60)),
        ]
        return cpb.GetStatusResponse(workers=[*decodes, prefill])


@pytest.fixture
async def router() -> AsyncIterator[str]:
    served, server = Router(), rpc.server()  # type: ignore[abstract]
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(served, server)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(served, server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=None)


async def test_running_workers_stand_beside_their_floors(toy: str, router: str) -> None:
    found = await asyncio.to_thread(examine, DoctorFlags(model=toy, address=router))
    assert (found.room.pages, found.model.dtype) == ((40, 60), "float32")
    assert found.machine.limits.flops_per_s == 100e9
    assert found.machine.rates[0].source == "the best of 3 workers, when they started"
    assert found.workers is not None
    seen = [(each.worker, each.mfu, each.pass_ms) for each in found.workers]
    assert seen == [("decode-0", 0.02, None), ("prefill-0", 0.25, 200)]
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in report(found).splitlines()[-2:]]
    assert rows == [
        ["decode-0", "decode", "100 %", "0.0", "-", "-", "-", "10 %", "2 %", "10 %"],
        ["prefill-0", "prefill", "40 %", "200.0", "100.0", "200.0", "50.0", "25 %", "25 %", "5 %"],
    ]


async def test_workers_without_limits_are_measured_against_this_machine(
    toy: str, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Router, "limits", None)
    rates = [Rate("read", 1e9, "B/s", "here"), Rate("torch", 50e9, "FLOP/s", "here")]
    monkeypatch.setattr(module, "measured", lambda config: rates)
    found = await asyncio.to_thread(examine, DoctorFlags(model=toy, address=router))
    assert found.machine.rates == tuple(rates)
    assert found.workers is not None
    assert found.workers[1].mfu == 0.5


async def test_another_model_than_the_one_that_runs_is_refused(
    toy: str, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Router, "model", pb.Model(name="mine", vocab_size=99, context_window=512, dtype="float32"))
    with pytest.raises(ConfigError, match=r"is not what runs at .* name mine"):
        await asyncio.to_thread(examine, DoctorFlags(model=toy, address=router))


async def test_nobody_there_is_a_typed_error(toy: str) -> None:
    with pytest.raises(Unavailable, match="is `pdserve up` running there"):
        await asyncio.to_thread(examine, DoctorFlags(model=toy, address="127.0.0.1:1"))
