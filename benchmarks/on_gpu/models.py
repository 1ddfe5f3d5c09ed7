"""Small models of several families through the CUDA engine, beside transformers."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.on_gpu.report import Context, Row
from engine.batch import Chunk
from engine.load import Engine, EngineConfig, load_engine
from tests.parity import LENGTHS, NUM_CANDIDATES, TIE, random_prompts, reference_of
from tests.toy import TOY_VOCAB_SIZE, write_toy_model
from tests.toy_families import FAMILIES

PART = "models"
NAMES = ("Llama, grouped", "Mistral", "Qwen3", "Gemma 3", "Mixtral")
# Sizes that all families share, so that few kernels have to be compiled.
SAME = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
NUM_TOKENS = 32
Texts = Sequence[tuple[list[int], Tensor]]  # prompt and completion, and the logits [tokens, vocab] that gave it


def rows(context: Context) -> Iterator[Row]:
    """A row or two for every family."""
    for name in NAMES[:1] if context.is_dry else NAMES:
        changes = dict(FAMILIES[name]) | SAME
        if changes.get("sliding_window"):
            changes["sliding_window"] = 48
        with tempfile.TemporaryDirectory() as folder:
            yield from _family(context, name, write_toy_model(Path(folder), **changes))


def _family(context: Context, name: str, folder: Path) -> Iterator[Row]:
    reference = reference_of(folder)
    lengths, count = (LENGTHS[:4], 4) if context.is_dry else (LENGTHS, NUM_TOKENS)
    prompts = random_prompts(TOY_VOCAB_SIZE, lengths, seed=3)
    engine = _engine(context, folder, "float32")
    texts = list(zip(*_greedy(engine, prompts, count), strict=True))
    yield _tokens(name, reference, texts)
    ours, theirs = _engine(context, folder, "bfloat16"), _reference_bf16(context, folder)
    errors: Mapping[str, list[float]] = {"ours": [], "theirs": []}
    for token_ids, _ in texts:
        expected = _logits(reference, token_ids, count)
        errors["ours"].append(_error(_prefilled(ours, token_ids, count), expected))
        errors["theirs"].append(_error(_logits(theirs, token_ids, count), expected))
    what = f"{name}, bfloat16: largest error of a log-probability"
    yield Row(PART, what, max(errors["ours"]), "", max(errors["theirs"]), "beside that of transformers in bfloat16")


def _engine(context: Context, folder: Path, dtype: Any) -> Engine:
    device: Any = context.device.type
    return load_engine(EngineConfig(str(folder), "toy", dtype, device, num_pages=512))


def _reference_bf16(context: Context, folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    return model.to(context.device).eval()


def _greedy(engine: Engine, prompts: Sequence[list[int]], count: int) -> tuple[list[list[int]], list[Tensor]]:
    """All prompts as one batch; the rows of a step are good until the next one only."""
    texts, own = [list(prompt) for prompt in prompts], [list[Tensor]() for _ in prompts]
    num_pages = engine.cache.layout.pages_for(max(map(len, prompts)) + count)
    starts = [0] * len(prompts)
    for _ in range(count):
        chunks = [
            Chunk(text[start:], start, range(index * num_pages, (index + 1) * num_pages), sample=True)
            for index, (text, start) in enumerate(zip(texts, starts, strict=True))
        ]
        for index, row in enumerate(engine.runner.run(chunks).cpu()):
            starts[index] = len(texts[index])
            own[index].append(row.clone())
            texts[index].append(int(row.argmax()))
    return texts, [torch.stack(rows) for rows in own]


def _prefilled(engine: Engine, token_ids: list[int], count: int) -> Tensor:
    """The logits of the last `count` tokens, computed in one pass."""
    pages = range(engine.cache.layout.pages_for(len(token_ids)))
    forward = engine.runner.start([Chunk(token_ids[:-1], 0, pages, sample=False)])
    forward.advance(len(engine.runner.model.layers))
    end = len(token_ids) - 1
    return forward.logits_of(slice(end - count, end)).cpu()


@torch.inference_mode()
def _logits(reference: Any, token_ids: list[int], count: int) -> Tensor:
    given = torch.tensor([token_ids[:-1]]).to(reference.device)
    found: Tensor = reference(given, logits_to_keep=count).logits[0].float().cpu()
    return found


def _tokens(name: str, reference: Any, texts: Texts) -> Row:
    """Greedy tokens of both in fp32; where the reference's two best are closer than TIE, either is right."""
    wrong = ties = total = 0
    worst = 0.0
    for token_ids, logits in texts:
        expected = _logits(reference, token_ids, len(logits))
        best = expected.topk(2).values
        differs = expected.argmax(-1) != torch.tensor(token_ids[-len(logits) :])
        is_tie = best[:, 0] - best[:, 1] < TIE
        wrong, ties = wrong + int((differs & ~is_tie).sum()), ties + int((differs & is_tie).sum())
        total, worst = total + len(logits), max(worst, _error(logits, expected))
    note = f"of {total}, and {ties} ties; log-probabilities within {worst:.1g}"
    return Row(PART, f"{name}, float32: greedy tokens that are not those of transformers", wrong, "", note=note)


def _error(logits: Tensor, expected: Tensor) -> float:
    """Among the reference's best candidates."""
    top = expected.topk(min(NUM_CANDIDATES, expected.shape[1])).indices
    return float((logits.log_softmax(-1).gather(1, top) - expected.log_softmax(-1).gather(1, top)).abs().max())
