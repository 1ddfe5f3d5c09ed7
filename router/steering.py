"""How a public request steers its tokens -> `Steering`, or InvalidRequest that says what is allowed."""

from collections.abc import Sequence

from pdserve.errors import InvalidRequest
from pdserve.grammar import check_grammar
from pdserve.request import WorkRequest
from pdserve.steering import GRAMMAR_KINDS, UNSTEERED, Grammar, Steering
from pdserve.v1 import generation_pb2 as pb
from router.checks import at_most, check_token_ids, require
from router.tokenizer import TextModel

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.0625, 16  # exact as float, so that the bounds are allowed
MAX_PENALTY = 2
MAX_BIAS = 100
MAX_TOKENS_LISTED = 1024
MAX_GRAMMAR_BYTES = 65536  # some ten milliseconds to compile


def steering_of(request: pb.GenerateRequest, vocab_size: int, text: TextModel) -> Steering | None:
    """None where the request asks for nothing of the kind. Raises InvalidRequest."""
    sampling = request.sampling
    steering = Steering(
        repetition_penalty=_repetition_penalty(sampling),
        frequency_penalty=_penalty("frequency_penalty", sampling.frequency_penalty),
        presence_penalty=_penalty("presence_penalty", sampling.presence_penalty),
        logit_bias=_logit_bias(sampling, vocab_size),
        allowed_token_ids=_listed("allowed_token_ids", sampling.allowed_token_ids, vocab_size),
        banned_token_ids=_listed("banned_token_ids", sampling.banned_token_ids, vocab_size),
        grammar=_grammar(request.grammar, text) if request.HasField("grammar") else None,
    )
    return None if steering == UNSTEERED else steering


def check_choice(work: WorkRequest, vocab_size: int) -> None:
    """The lists must leave a token for every step. Raises InvalidRequest."""
    steering = work.steering
    if steering is None or not (steering.allowed_token_ids or steering.banned_token_ids):
        return
    left = set(steering.allowed_token_ids or range(vocab_size)) - set(steering.banned_token_ids)
    field = "sampling.allowed_token_ids" if steering.allowed_token_ids else "sampling.banned_token_ids"
    if not left:
        raise InvalidRequest(field, "leaves no token to choose; allow one that banned_token_ids has not")
    if work.min_tokens and left <= work.stop_token_ids:
        problem = "leaves nothing but tokens that end the completion; allow others, or set stopping.min_tokens to 0"
        raise InvalidRequest(field, problem)


def _repetition_penalty(sampling: pb.Sampling) -> float:
    if not sampling.HasField("repetition_penalty"):
        return UNSTEERED.repetition_penalty
    value, lowest, highest = sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    require(lowest <= value <= highest, "sampling.repetition_penalty", value, f"{lowest} to {highest}")
    return value


def _penalty(name: str, value: float) -> float:
    require(-MAX_PENALTY <= value <= MAX_PENALTY, f"sampling.{name}", value, f"{-MAX_PENALTY} to {MAX_PENALTY}")
    return value


def _logit_bias(sampling: pb.Sampling, vocab_size: int) -> tuple[tuple[int, float], ...]:
    at_most("sampling.logit_bias", len(sampling.logit_bias), MAX_TOKENS_LISTED)
    for token_id, bias in sampling.logit_bias.items():
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            raise InvalidRequest(field, f"{token_id} is outside the vocabulary; must be 0 to {vocab_size - 1}")
        require(-MAX_BIAS <= bias <= MAX_BIAS, field, bias, f"{-MAX_BIAS} to {MAX_BIAS}")
    return tuple(sorted(sampling.logit_bias.items()))


def _grammar(given: pb.Grammar, text: TextModel) -> Grammar:
    kind = given.WhichOneof("source")
    if kind is None:
        raise InvalidRequest("grammar", f"is empty; set one of {', '.join(GRAMMAR_KINDS)}, or leave grammar unset")
    grammar = Grammar(kind, getattr(given, kind))
    if (size := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"grammar.{kind}", f"has {size} bytes; at most {MAX_GRAMMAR_BYTES}")
    if text.tokenizer is None:
        raise InvalidRequest(f"grammar.{kind}", "this model has no tokenizer; send the request without grammar")
    check_grammar(grammar)
    return grammar


def _listed(name: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    at_most(f"sampling.{name}", len(token_ids), MAX_TOKENS_LISTED)
    check_token_ids(f"sampling.{name}", token_ids, vocab_size)
    return tuple(sorted(set(token_ids)))
