"""Parity with transformers at scale: SmolLM2 in fp32, greedy, prompt by prompt, token by token.

    python -m benchmarks.parity [--prompts 100] [--tokens 128]

Our engine decodes in batches; the reference then reads each whole text once. Its best token at every position must be
ours, which by induction is what its own greedy generation would give. Where its two best logits are closer than 1e-4
either choice is right: such cases are counted, at most 1 in 10,000.
"""

import argparse
import itertools
import time

import torch
from transformers import LlamaForCausalLM

from cluster.model_store import resolve
from engine.batch import Chunk
from engine.load import Engine, EngineConfig, load_engine
from router.chat import Message
from router.tokenizer import TextModel

TIE = 1e-4
BATCH = 25
TASKS = (
    "Explain {} in two sentences.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "{}: good or bad?",
)
TOPICS = [
    "rivers",
    "chess",
    "the number 1000000",
    "volcanoes",
    "jazz",
    "bees",
    "gravity",
    "bread",
    "winter",
    "robots",
    "coffee",
    "the Moon",
    "2026",
    "kites",
    "glass",
    "memory",
    "trains",
    "年假怎么申请",
    "salt",
    "whales",
    "debt",
    "maps",
    "rust",
    "fire",
    "democracy",
]


def prompts(text: TextModel, count: int) -> list[list[int]]:
    """Chat prompts of different lengths."""
    pairs = itertools.islice(itertools.cycle(itertools.product(TASKS, TOPICS)), count)
    return [text.encode_chat([Message("user", task.format(topic))]) for task, topic in pairs]


def greedy(engine: Engine, batch: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Each prompt with `num_tokens` more."""
    layout, texts = engine.card.kv_layout, [list(prompt) for prompt in batch]
    num_pages = max(layout.pages_for(len(prompt) + num_tokens) for prompt in batch)
    starts = [0] * len(batch)
    for _ in range(num_tokens):
        chunks = [
            Chunk(ids[start:], start, range(row * num_pages, (row + 1) * num_pages), sample=True)
            for row, (ids, start) in enumerate(zip(texts, starts, strict=True))
        ]
        starts = [len(ids) for ids in texts]
        for ids, token_id in zip(texts, engine.runner.run(chunks).argmax(-1).tolist(), strict=True):
            ids.append(token_id)
    return texts


@torch.inference_mode()
def differences(reference: LlamaForCausalLM, ids: list[int], num_prompt: int) -> tuple[int, int]:
    """Tokens that differ from the reference's best: (ties, errors)."""
    logits = reference(torch.tensor([ids[:-1]])).logits[0, num_prompt - 1 :]
    best = logits.topk(2).values
    differs = logits.argmax(-1) != torch.tensor(ids[num_prompt:])
    is_tie = best[:, 0] - best[:, 1] < TIE
    return int((differs & is_tie).sum()), int((differs & ~is_tie).sum())


def main() -> None:
    """Compare and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    began = time.perf_counter()
    folder = resolve("smollm2").folder
    engine = load_engine(EngineConfig(str(folder), "smollm2", "float32"))
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    every = prompts(TextModel.load(folder), arguments.prompts)
    ties = errors = 0
    for first in range(0, len(every), BATCH):
        batch = every[first : first + BATCH]
        for prompt, ids in zip(batch, greedy(engine, batch, arguments.tokens), strict=True):
            found = differences(reference, ids, len(prompt))
            ties, errors = ties + found[0], errors + found[1]
    total = len(every) * arguments.tokens
    print(f"{total} tokens, {errors} wrong, {ties} ties went the other way, {time.perf_counter() - began:.0f} s")
    if errors or ties > max(1, total // 10_000):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
