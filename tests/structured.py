"""Structured completions of a toy model: what asks for them, and one engine that makes many side by side."""

import json
from collections.abc import Sequence
from pathlib import Path

from engine.batch import Chunk
from engine.load import Engine, EngineConfig, load_engine
from engine.pilot import pilot_of
from engine.sampler import Step, sample
from pdserve.request import Sampling, Token, WorkRequest
from pdserve.steering import Grammar, Steering
from tests.json_schemas import Schema
from tests.toy import write_toy_model
from tests.toy_tokenizer import TOY_EOS_ID, toy_tokenizer, write_toy_tokenizer

PROMPT = (5, 6, 7)
TOKENIZER = toy_tokenizer()
MAX_TOKENS = 300
# A random model knows no end: it is helped to close what it opens, to escape, and to leave white space out.
BIAS = tuple(
    sorted(
        (token_id, value)
        for text, value in {'"': 4.0, "}": 4.0, "]": 4.0, "\\": 4.0, "n": 2.0, " ": -4.0, "\n": -4.0}.items()
        for token_id in TOKENIZER.encode(text).ids
    )
)


def structured_engine(folder: Path, num_pages: int = 64) -> Engine:
    """A small random model whose tokens can write any text."""
    write_toy_model(folder, num_hidden_layers=1)
    write_toy_tokenizer(folder)
    return load_engine(EngineConfig(str(folder), "toy", "float32", num_pages=num_pages))


def structured(schema: Schema, seed: int) -> WorkRequest:
    """A completion that is to follow the schema."""
    steering = Steering(logit_bias=BIAS, grammar=Grammar("json_schema", json.dumps(schema)))
    stops = frozenset({TOY_EOS_ID})
    return WorkRequest("r", PROMPT, len(PROMPT), Sampling(seed=seed), MAX_TOKENS, 0, stops, steering=steering)


def complete_all(engine: Engine, works: Sequence[WorkRequest]) -> list[list[Token]]:
    """Every completion, all in one batch."""
    size = engine.card.kv_layout.pages_for(len(PROMPT) + MAX_TOKENS)
    pages = [range(index * size, (index + 1) * size) for index in range(len(works))]
    chunks = [Chunk(work.token_ids, 0, pages[index], sample=True) for index, work in enumerate(works)]
    pilots = [pilot_of(work, engine.card.vocab_size, engine.grammars) for work in works]
    done: list[list[Token]] = [[] for _ in works]
    open_ = list(range(len(works)))
    while open_:
        steps = [Step(works[i], works[i].num_emitted + len(done[i]), pilots[i]) for i in open_]
        for index, token in zip(open_, sample(engine.runner.run([chunks[i] for i in open_]), steps), strict=True):
            pilot, start = pilots[index], len(works[index].token_ids) + len(done[index])
            done[index].append(token if pilot is None else pilot.take(token))
            chunks[index] = Chunk([token.token_id], start, pages[index], sample=True)
        open_ = [index for index in open_ if not done[index][-1].finish]
    return done


def text_of(token_ids: Sequence[int]) -> str:
    """Without end-of-sequence tokens."""
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=True))
