"""The vocabulary as internal protobuf messages and back: the only place that knows both."""

from typing import cast

from pdserve.errors import PdserveError, from_wire
from pdserve.internal.v1 import worker_pb2
from pdserve.request import Candidate, Incarnation, Sampling, Scored, Ticket, Token, WorkerId, WorkRequest
from pdserve.steering import Grammar, GrammarKind, Steering


def request_to_wire(request: WorkRequest) -> worker_pb2.WorkRequest:
    """A request, every field."""
    return worker_pb2.WorkRequest(
        label=request.label,
        token_ids=request.token_ids,
        prompt_length=request.prompt_length,
        temperature=request.sampling.temperature,
        top_k=request.sampling.top_k,
        top_p=request.sampling.top_p,
        min_p=request.sampling.min_p,
        seed=request.sampling.seed,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        top_logprobs=request.top_logprobs,
        logprobs=request.logprobs,
        logprobs_as_drawn=request.logprobs_as_drawn,
        prompt_logprobs=request.prompt_logprobs,
        steering=None if request.steering is None else steering_to_wire(request.steering),
    )


def request_from_wire(message: worker_pb2.WorkRequest) -> WorkRequest:
    """The inverse of `request_to_wire`."""
    return WorkRequest(
        label=message.label,
        token_ids=tuple(message.token_ids),
        prompt_length=message.prompt_length,
        sampling=Sampling(message.temperature, message.top_k, message.top_p, message.min_p, message.seed),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        top_logprobs=message.top_logprobs,
        logprobs=message.logprobs,
        logprobs_as_drawn=message.logprobs_as_drawn,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        steering=steering_from_wire(message.steering) if message.HasField("steering") else None,
    )


def steering_to_wire(steering: Steering) -> worker_pb2.Steering:
    """What steers a request, every field."""
    grammar = steering.grammar
    return worker_pb2.Steering(
        repetition_penalty=steering.repetition_penalty,
        presence_penalty=steering.presence_penalty,
        frequency_penalty=steering.frequency_penalty,
        logit_bias=dict(steering.logit_bias),
        allowed_token_ids=steering.allowed_token_ids,
        banned_token_ids=steering.banned_token_ids,
        grammar=None if grammar is None else worker_pb2.Grammar(kind=grammar.kind, text=grammar.text),
    )


def steering_from_wire(message: worker_pb2.Steering) -> Steering:
    """The inverse of `steering_to_wire`."""
    return Steering(
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        banned_token_ids=tuple(message.banned_token_ids),
        grammar=_grammar_from_wire(message.grammar) if message.HasField("grammar") else None,
    )


def _grammar_from_wire(message: worker_pb2.Grammar) -> Grammar:
    return Grammar(cast(GrammarKind, message.kind), message.text)  # one that is none is refused where it is compiled


def ticket_to_wire(ticket: Ticket) -> worker_pb2.Ticket:
    """A ticket, every field."""
    return worker_pb2.Ticket(
        worker=ticket.worker,
        incarnation=ticket.incarnation,
        counter=ticket.counter,
        cached_pages=ticket.cached_pages,
    )


def ticket_from_wire(message: worker_pb2.Ticket) -> Ticket:
    """The inverse of `ticket_to_wire`."""
    return Ticket(WorkerId(message.worker), Incarnation(message.incarnation), message.counter, message.cached_pages)


def token_to_wire(token: Token) -> worker_pb2.Token:
    """A token, every field."""
    return worker_pb2.Token(
        number=token.number,
        token_id=token.token_id,
        top_logprobs=map(candidate_to_wire, token.top_logprobs),
        finish=token.finish,
        logprob=token.logprob,
    )


def token_from_wire(message: worker_pb2.Token) -> Token:
    """The inverse of `token_to_wire`."""
    candidates = tuple(map(candidate_from_wire, message.top_logprobs))
    logprob = message.logprob if message.HasField("logprob") else None
    return Token(message.number, message.token_id, candidates, message.finish, logprob)


def candidate_to_wire(candidate: Candidate) -> worker_pb2.Candidate:
    """A candidate, every field."""
    return worker_pb2.Candidate(token_id=candidate.token_id, logprob=candidate.logprob)


def candidate_from_wire(message: worker_pb2.Candidate) -> Candidate:
    """The inverse of `candidate_to_wire`."""
    return Candidate(message.token_id, message.logprob)


def scored_to_wire(scored: Scored) -> worker_pb2.Scored:
    """A scored token, every field."""
    return worker_pb2.Scored(chosen=candidate_to_wire(scored.chosen), top=map(candidate_to_wire, scored.top))


def scored_from_wire(message: worker_pb2.Scored) -> Scored:
    """The inverse of `scored_to_wire`."""
    return Scored(candidate_from_wire(message.chosen), tuple(map(candidate_from_wire, message.top)))


def failure_to_wire(error: PdserveError) -> worker_pb2.Failure:
    """A typed error by class name and message."""
    return worker_pb2.Failure(kind=type(error).__name__, message=str(error))


def failure_from_wire(message: worker_pb2.Failure) -> PdserveError:
    """The inverse of `failure_to_wire`."""
    return from_wire(message.kind, message.message)
