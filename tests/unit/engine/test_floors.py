"""What a pass costs: against torch's own count, against the textbook, and as a runner tallies it."""

import json
from dataclasses import replace
from itertools import pairwise
from math import isclose
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.batch import Chunk
from engine.config_file import read_config
from engine.floors import ModelCost, decode_floor, model_cost, prefill_floor
from engine.kernels import torch_kernels
from engine.kv_cache import KvCache, kv_layout
from engine.model import Model
from engine.runner import Runner
from engine.weights import random_weights
from pdserve.speed import Limits, Work
from tests.toy import toy_config, toy_config_json, toy_engine, write_toy_model

LLAMA_3_8B = toy_config_json(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=None, max_position_embeddings=8192,
)  # fmt: skip
H100 = Limits(read_bytes_per_s=3.35e12, flops_per_s=989e12)  # data sheet: SXM, dense bfloat16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelCost:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    config = read_config(folder)
    return model_cost(config, kv_layout(config, "bfloat16"))


def test_the_sizes_of_an_8b_model(llama: ModelCost) -> None:
    assert llama.num_parameters == 8_030_261_248  # as its model card has it
    assert llama.stored_bytes == 16_060_522_496
    assert llama.kv_token_bytes == 128 * 1024


def test_the_textbook_figures_on_an_h100(llama: ModelCost) -> None:
    """32 ms for a prompt of 2,000 tokens, 4.8 ms for a token; counted exactly both are a little less."""
    prefill, decode = prefill_floor(llama, H100, 2000), decode_floor(llama, H100, 1, 1)
    assert (round(prefill.textbook_ms, 1), round(decode.textbook_ms, 2)) == (32.5, 4.79)
    assert (round(prefill.floor_ms, 1), round(decode.floor_ms, 2)) == (29.3, 4.48)


def test_a_step_is_as_long_as_the_slower_of_bus_and_arithmetic(llama: ModelCost) -> None:
    few, many = (decode_floor(llama, H100, batch, 128) for batch in (1, 1024))
    assert few.floor_ms == few.read_ms > few.compute_ms
    assert many.floor_ms == many.compute_ms > many.read_ms
    assert many.tokens_per_s == pytest.approx(1024 / many.floor_ms * 1000)
    assert prefill_floor(llama, H100, 1).floor_ms == pytest.approx(decode_floor(llama, H100, 1, 1).floor_ms)


@pytest.mark.parametrize("is_tied", [False, True])
def test_torch_counts_the_same_flops(tmp_path: Path, is_tied: bool) -> None:
    """16 rows, all of them sampled, as torch's linear layers compute no fewer."""
    config = toy_config(tmp_path, tie_word_embeddings=is_tied)
    layout, cpu = kv_layout(config, "float32"), torch.device("cpu")
    model = Model(config, random_weights(config, 0), torch_kernels(), torch.float32, cpu)
    runner = Runner(model, KvCache(layout, 16, cpu))
    for start in range(3):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the others are not counted
            runner.run([Chunk([7], start, [page], sample=True) for page in range(16)])
        assert counter.get_total_flops() == model_cost(config, layout).decode(16, start + 1).flops


def test_bytes_of_a_step_are_those_of_the_tensors(tmp_path: Path) -> None:
    config = toy_config(tmp_path)
    cost = model_cost(config, kv_layout(config, "bfloat16"))
    weights = random_weights(config, 0, torch.bfloat16)
    assert cost.stored_bytes == sum(each.nbytes for each in weights.values())
    read = sum(each.nbytes for name, each in weights.items() if each.dim() == 2 and "embed" not in name)
    assert cost.decode(3, 5).read_bytes == read + 3 * 5 * cost.kv_token_bytes
    assert cost.work([(0, 4)], sampled=0).read_bytes < cost.work([(0, 4)], sampled=1).read_bytes


def test_chunks_cost_together_what_the_whole_prompt_costs(llama: ModelCost) -> None:
    tokens, cuts = [1] * 500, (0, 160, 320, 500)
    chunks = [Chunk(tokens[a:b], a, [], sample=b == 500) for a, b in pairwise(cuts)]
    assert llama.of_chunks([Chunk(tokens, 0, [], sample=True)]) == llama.prefill(500)
    assert sum(llama.of_chunks([each]).flops for each in chunks) == llama.prefill(500).flops
    assert llama.of_chunks([Chunk([1], 99, [], sample=True)] * 8) == llama.decode(8, 100)


def test_a_layer_with_a_reach_sees_no_further(llama: ModelCost) -> None:
    near = replace(llama, reaches=((4, 32),))
    assert near.prefill(4) == llama.prefill(4)
    pairs, positions = 1 + 2 + 3 + 4 * 97, 100
    assert near.prefill(100).flops == llama.work([(0, 100)], 1).flops - 32 * llama.pair_flops * (5050 - pairs)
    assert near.prefill(100).read_bytes == llama.prefill(100).read_bytes, f"all {positions} are seen by some row"
    assert near.decode(1, 100).read_bytes == llama.decode(1, 4).read_bytes


def test_a_row_meets_its_experts_and_a_pass_reads_those_of_its_rows(llama: ModelCost) -> None:
    sparse = replace(llama, linear_weights=1000, expert_weights=8000, met_share=0.25, head_weights=0, pair_flops=0)
    one, many = sparse.decode(1, 1), sparse.decode(1000, 1)
    assert one.flops == 2 * (1000 + 2000)
    kv_bytes = sparse.kv_token_bytes
    assert one.read_bytes == 2 * (1000 + 2000) + kv_bytes
    assert many.read_bytes == pytest.approx(2 * (1000 + 8000) + 1000 * kv_bytes)


def test_a_runner_tallies_what_it_computes_layer_by_layer(tmp_path: Path) -> None:
    engine = toy_engine(write_toy_model(tmp_path))
    runner, prompt = engine.runner, Chunk(range(1, 33), 0, range(2), sample=True)
    whole = model_cost(runner.model.config, engine.card.kv_layout).prefill(32)
    forward = runner.start([prompt])
    assert runner.tally.work(1.5, 0.5) == Work(clock_s=1.5, busy_s=0.5)
    forward.advance(1)
    third = runner.tally.work(0, 0)
    assert (third.passes, third.tokens) == (0, 0)
    assert isclose(third.flops, whole.flops / 3)
    forward.advance(5)
    runner.start([prompt]).advance(2)  # and dropped
    work = runner.tally.work(0, 0)
    assert (work.passes, work.tokens) == (1, 32)
    assert isclose(work.flops, whole.flops * 5 / 3)
    assert isclose(work.read_bytes, whole.read_bytes * 5 / 3)
