"""A public request -> a plan, or InvalidRequest that names the field and says what is allowed.

Cheap checks come before the prompt is tokenized. Defaults are those of the comments in generation.proto.
`plan` is pure; it may run in a thread when the prompt is long.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import InvalidRequest
from pdserve.model_card import ModelCard
from pdserve.request import MAX_TOP_LOGPROBS, Sampling, WorkRequest
from pdserve.v1 import generation_pb2 as pb
from router.chat import ROLES, Message
from router.checks import at_most, check_token_ids, require, within
from router.steering import check_choice, steering_of
from router.tokenizer import TextModel

MAX_TEMPERATURE = 100
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LABEL_CHARACTERS = 256
MAX_CHOICES = 64  # as many as a decode step has rows by default
DEFAULT_MAX_TOKENS = 256
_REPLAY_COST = 4  # of a token of `resume`, in characters of a prompt: 2 to 4 us
_GRAMMAR_COST = 4  # of a byte of a grammar


@dataclass(frozen=True)
class ServedModel:
    """A model that some workers serve: their card, its text side, and the room that its workers have."""

    card: ModelCard
    text: TextModel
    max_request_tokens: int  # prompt and completion together, that an idle worker has pages for


@dataclass(frozen=True)
class Plan:
    """A request that can be served; of several choices, the first."""

    work: WorkRequest
    stop: tuple[str, ...]  # stop strings; workers know nothing of them
    priority: int  # lower is served first
    eos_token_ids: frozenset[int]  # those that end this completion: empty with ignore_eos
    window: int
    window_limited: bool  # the window cut max_tokens
    num_choices: int
    index: int = 0  # which choice


@dataclass(frozen=True)
class _Stopping:
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool


def plan(request: pb.GenerateRequest, model: ServedModel, label: str) -> Plan:
    """Check everything and fill in the defaults. Raises InvalidRequest."""
    card = model.card
    check_label(label)
    sampling, stopping = _sampling(request.sampling, _seed(request)), _stopping(request.stopping, model)
    top_logprobs = within("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    prompt_logprobs = within("prompt_logprobs", request.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
    num_choices = within("n", request.n, 1, MAX_CHOICES) if request.HasField("n") else 1
    _check_stage(request)
    steering = steering_of(request, card.vocab_size, model.text)
    _check_resume(request, card)
    prompt = _fitted_prompt(request, model)
    max_tokens = min(stopping.max_tokens, card.window - len(prompt))
    _check_pages(len(prompt), max_tokens, model.max_request_tokens)
    eos_token_ids = frozenset() if stopping.ignore_eos else frozenset(card.eos_token_ids)
    work = WorkRequest(
        label=label,
        token_ids=prompt,
        prompt_length=len(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=min(stopping.min_tokens, max_tokens),
        stop_token_ids=stopping.stop_token_ids | eos_token_ids,
        top_logprobs=top_logprobs,
        steering=steering,
        logprobs=request.logprobs,
        logprobs_as_drawn=request.logprobs_stage == pb.LOGPROBS_STAGE_DRAWN,
        prompt_logprobs=prompt_logprobs if request.HasField("prompt_logprobs") else None,
    )
    check_choice(work, card.vocab_size)
    work = work.resumed(_received(request, work))
    limited = max_tokens < stopping.max_tokens
    return Plan(work, stopping.stop, request.priority, eos_token_ids, card.window, limited, num_choices)


def check_label(label: str) -> None:
    """Labels go into logs."""
    if len(label) > MAX_LABEL_CHARACTERS:
        raise InvalidRequest("request_id", f"has {len(label)} characters; at most {MAX_LABEL_CHARACTERS}")


def chat_messages(chat: pb.Chat) -> list[Message]:
    """The messages, when their roles are known."""
    if not chat.messages:
        raise InvalidRequest("chat.messages", "is empty; send at least one message")
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            problem = f"{message.role!r} is unknown; must be one of {', '.join(ROLES)}"
            raise InvalidRequest(f"chat.messages[{index}].role", problem)
    return [Message(message.role, message.content) for message in chat.messages]


def prompt_size(request: pb.GenerateRequest | pb.TokenizeRequest) -> int:
    """How much there is to tokenize or to look through, as characters."""
    size = len(request.text) + sum(len(message.content) for message in request.chat.messages)
    if isinstance(request, pb.GenerateRequest):
        size += len(request.token_ids.ids) + _REPLAY_COST * len(request.resume.token_ids)
        size += _GRAMMAR_COST * request.grammar.ByteSize()
    return size


def _check_resume(request: pb.GenerateRequest, card: ModelCard) -> None:
    """What can be known before the prompt is tokenized."""
    if not request.HasField("resume"):
        return
    resume = request.resume
    if request.n > 1:
        problem = (
            f"{request.n} is not allowed with resume, which goes on with one choice; must be 1 or unset: send one "
            "request per unfinished choice, with that choice's seed and tokens in resume"
        )
        raise InvalidRequest("n", problem)
    if resume.model_fingerprint != card.fingerprint:
        problem = (
            f"{resume.model_fingerprint!r} is not the model that is served here, {card.fingerprint!r}: another one's "
            "tokens cannot be continued; send the request without resume"
        )
        raise InvalidRequest("resume.model_fingerprint", problem)
    check_token_ids("resume.token_ids", resume.token_ids, card.vocab_size)


def _received(request: pb.GenerateRequest, work: WorkRequest) -> Sequence[int]:
    """The completion tokens that the client has; whether one of them ends the completion is for the Answer to see."""
    if not request.HasField("resume"):
        return ()
    resume = request.resume
    if resume.prompt_tokens != work.prompt_length:
        problem = f"{resume.prompt_tokens} is not allowed; the prompt has {work.prompt_length} tokens after truncation"
        raise InvalidRequest("resume.prompt_tokens", problem)
    if len(resume.token_ids) > work.max_tokens:
        problem = f"has {len(resume.token_ids)} entries, but this completion at most {work.max_tokens} tokens"
        raise InvalidRequest("resume.token_ids", problem)
    return resume.token_ids


def _check_stage(request: pb.GenerateRequest) -> None:
    if request.logprobs_stage not in pb.LogprobsStage.values():
        problem = f"{request.logprobs_stage} is unknown; must be one of {', '.join(pb.LogprobsStage.keys())}"
        raise InvalidRequest("logprobs_stage", problem)


def _seed(request: pb.GenerateRequest) -> int:
    sampling, resume = request.sampling, request.resume
    if not request.HasField("resume"):
        return sampling.seed if sampling.HasField("seed") else secrets.randbits(63)
    if sampling.HasField("seed") and sampling.seed != resume.seed:
        raise InvalidRequest("sampling.seed", f"{sampling.seed} is not resume.seed; must be unset or {resume.seed}")
    return resume.seed


def _sampling(sampling: pb.Sampling, seed: int) -> Sampling:
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    require(0 <= temperature <= MAX_TEMPERATURE, "sampling.temperature", temperature, f"0 to {MAX_TEMPERATURE}")
    require(0 < top_p <= 1, "sampling.top_p", top_p, "more than 0, and at most 1")
    require(0 <= sampling.min_p <= 1, "sampling.min_p", sampling.min_p, "0 to 1")
    require(sampling.top_k >= 0, "sampling.top_k", sampling.top_k, "at least 0 (0: all tokens)")
    return Sampling(temperature=temperature, top_k=sampling.top_k, top_p=top_p, min_p=sampling.min_p, seed=seed)


def _stopping(stopping: pb.Stopping, model: ServedModel) -> _Stopping:
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else DEFAULT_MAX_TOKENS
    require(max_tokens >= 1, "stopping.max_tokens", max_tokens, "at least 1")
    within("stopping.min_tokens", stopping.min_tokens, 0, max_tokens)
    _check_stop_strings(stopping.stop, model.text)
    at_most("stopping.stop_token_ids", len(stopping.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids, model.card.vocab_size)
    return _Stopping(
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop=tuple(stopping.stop),
        stop_token_ids=frozenset(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
    )


def _check_stop_strings(stop: Sequence[str], text: TextModel) -> None:
    if stop and text.tokenizer is None:
        raise InvalidRequest("stopping.stop", "this model has no tokenizer; use stop_token_ids")
    at_most("stopping.stop", len(stop), MAX_STOP_STRINGS)
    for index, string in enumerate(stop):
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            problem = f"has {len(string)} characters; must have 1 to {MAX_STOP_CHARACTERS}"
            raise InvalidRequest(f"stopping.stop[{index}]", problem)


def _fitted_prompt(request: pb.GenerateRequest, model: ServedModel) -> tuple[int, ...]:
    """The prompt's last `truncate_prompt_tokens` tokens; they must leave room for one token in the window."""
    keep = request.truncate_prompt_tokens
    if request.HasField("truncate_prompt_tokens"):
        require(keep >= 1, "truncate_prompt_tokens", keep, "at least 1")
    field, token_ids = _prompt(request, model)
    if not token_ids:
        raise InvalidRequest(field, "the prompt is empty; it must have at least one token")
    prompt = tuple(token_ids[-keep:])  # all of them when keep is unset, which reads as 0
    longest = model.card.window - 1
    if len(prompt) > longest:
        problem = (
            f"the prompt has {len(prompt)} tokens, but the context window of {model.card.window} leaves room "
            f"for at most {longest}; shorten it or set truncate_prompt_tokens to 1 to {longest}"
        )
        raise InvalidRequest(field, problem)
    return prompt


def _prompt(request: pb.GenerateRequest, model: ServedModel) -> tuple[str, Sequence[int]]:
    """Field name and tokens of the prompt, whatever it is made of."""
    match request.WhichOneof("prompt"):
        case "text":
            return "text", model.text.encode(request.text) if request.text else []
        case "chat":
            return "chat", model.text.encode_chat(chat_messages(request.chat))
        case "token_ids":
            check_token_ids("token_ids.ids", request.token_ids.ids, model.card.vocab_size)
            return "token_ids.ids", request.token_ids.ids
        case _:
            raise InvalidRequest("prompt", "is not set; send one of text, token_ids, chat")


def _check_pages(prompt_tokens: int, max_tokens: int, max_request_tokens: int) -> None:
    if prompt_tokens + max_tokens <= max_request_tokens:
        return
    room = max_request_tokens - prompt_tokens
    problem = (
        f"{prompt_tokens} prompt tokens and {max_tokens} completion tokens can never fit: the workers have pages for "
        f"{max_request_tokens} tokens; "
    )
    if room < 1:
        raise InvalidRequest("prompt", problem + f"the prompt must have at most {max_request_tokens - 1}")
    raise InvalidRequest("stopping.max_tokens", problem + f"must be 1 to {room} for this prompt")
