"""What comes for one request, kept and made ready to show.

responses -> an `Answer` for each choice -> text as it comes, the choices one after the other; or one JSON object
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from pdserve.v1 import generation_pb2 as pb

BAR_WIDTH = 40
_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass
class Answer:
    """All that came of one choice."""

    started: pb.Started
    finished: pb.Finished = field(default_factory=pb.Finished)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token
    steps: list[list[dict[str, Any]]] = field(default_factory=list)  # candidates of each token
    unshown: list[str] = field(default_factory=list)

    def add(self, delta: pb.Delta) -> None:
        """Keep what it says."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.unshown += [] if delta.top_logprobs else [delta.text]
        for step in delta.top_logprobs:
            candidates = [plain(each) for each in step.candidates]
            self.unshown += bars(delta.text, candidates or [plain(step.chosen)])
            self.logprobs.append(step.chosen.logprob)
            self.steps += [candidates] if candidates else []

    def to_plain(self) -> dict[str, Any]:
        """The object that --json prints."""
        stop_match = self.finished.stop_match
        matched = stop_match.WhichOneof("match")
        return {
            "text": "".join(self.texts),
            "token_ids": self.token_ids,
            "finish_reason": _FINISH_REASONS.get(self.finished.finish_reason, ""),
            "stop_match": {matched: getattr(stop_match, matched)} if matched else {},
            "usage": plain(self.finished.usage),
            "timings": plain(self.finished.timings),
            "workers": plain(self.finished.workers),
            "started": plain(self.started),
            **({"logprobs": self.logprobs} if self.logprobs else {}),
            **({"top_logprobs": self.steps} if self.steps else {}),
        }


class Answers:
    """The choices of one request."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._choices: list[Answer] = []
        self._num_shown = 0

    def add(self, response: pb.GenerateResponse) -> None:
        """Keep one message."""
        match response.WhichOneof("event"):
            case "started":
                heading = f"[{response.started.index}] seed {response.started.seed}\n"
                self._choices.append(Answer(response.started, unshown=[heading] if self._several else []))
            case "delta":
                self._choices[response.delta.index].add(response.delta)
            case "finished":
                answer = self._choices[response.finished.index]
                answer.finished = response.finished
                answer.unshown.append("\n")

    def fresh(self) -> Iterator[str]:
        """What can be shown now that could not before: all of the choices that have ended, and of the next one."""
        while self._num_shown < len(self._choices):
            answer = self._choices[self._num_shown]
            yield from answer.unshown
            answer.unshown.clear()
            if not answer.finished.finish_reason:
                return
            self._num_shown += 1

    @property
    def is_empty(self) -> bool:
        """Whether no text has come."""
        return not any(answer.texts for answer in self._choices)

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended a choice."""
        return any(answer.finished.finish_reason == pb.FINISH_REASON_LENGTH for answer in self._choices)

    def to_plain(self) -> dict[str, Any]:
        """The object that --json prints."""
        plains = [answer.to_plain() for answer in self._choices]
        return {"choices": plains} if self._several else plains[0]


def bars(text: str, candidates: list[dict[str, Any]]) -> Iterator[str]:
    """One step as lines: the chosen token, then a bar per candidate, likeliest first."""
    yield f"{text!r}\n"
    width = max((len(repr(each["text"])) for each in candidates), default=0)
    for each in candidates:
        probability = math.exp(each["logprob"])
        yield f"  {each['text']!r:<{width}} {'█' * round(BAR_WIDTH * probability):<{BAR_WIDTH}} {probability:6.1%}\n"


def plain(message: Message) -> dict[str, Any]:
    """The scalar fields of a message, defaults included."""
    return {each.name: getattr(message, each.name) for each in message.DESCRIPTOR.fields}
