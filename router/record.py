"""What is written down about one request, and the only place where usage and stage times are computed.

`Choices` makes a record for every choice of a request; the pipeline fills it in while the choice walks over the workers
(`add_token` for every token that it yields); `Choices` turns it into the last message of the answer.
All times are seconds on the event loop's clock, None until the thing has happened.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.membership import WorkerInfo
from pdserve.request import Scored
from pdserve.v1 import generation_pb2 as pb


@dataclass
class RequestRecord:
    """Times, counts and workers of one choice of a request."""

    arrived: float
    lead: "RequestRecord | None" = None  # of the choice of the same request that went ahead with the prompt
    prompt_tokens: int = 0  # after truncation
    chosen: float | None = None  # workers were chosen (first attempt)
    first_token: float | None = None
    kv_arrived: float | None = None  # decode had all the KV
    second_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    completion_tokens: int = 0  # that the pipeline yielded
    received_tokens: int = 0  # completion tokens that the client brought along in `resume`
    resumes: int = 0  # attempts after the first one
    computed_tokens: int = 0  # that prefill computed: of the prompt, after a resume also of the completion so far
    cached_tokens: int = 0  # prompt tokens that needed no computing
    decode_steps: int = 0
    kv_bytes: int = 0  # over the link
    prompt_scores: Sequence[Scored] = ()  # of prompt tokens from the second on, where asked for
    prefill: WorkerInfo | None = None
    decode: WorkerInfo | None = None

    def add_token(self, now: float) -> None:
        """Count one completion token that goes to the client at `now`."""
        self.completion_tokens += 1
        self.last_token = now
        if self.first_token is None:
            self.first_token = now
        elif self.second_token is None:
            self.second_token = now

    def usage(self) -> pb.Usage:
        """Tokens and steps."""
        return pb.Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.received_tokens + self.completion_tokens,
            prefill_tokens_computed=self.computed_tokens,
            decode_steps=self.decode_steps,
            resumes=self.resumes,
        )

    def timings(self) -> pb.Timings:
        """Stage times in milliseconds; a stage that did not happen took 0."""
        return pb.Timings(
            queue_ms=_span_ms(self.arrived, self.chosen),
            prefill_ms=_span_ms(self.chosen, self.first_token),
            transfer_ms=_span_ms(self.first_token, self.kv_arrived),
            first_decode_ms=_span_ms(self.kv_arrived, self.second_token),
            ttft_ms=_span_ms(self.arrived, self.first_token),
            second_token_ms=_span_ms(self.arrived, self.second_token),
            tpot_ms=self._tpot_ms(),
            total_ms=_span_ms(self.arrived, self.finished),
        )

    def workers(self) -> pb.Workers:
        """Who did it; decode stays empty where the first token was the last."""
        return pb.Workers(
            prefill=self.prefill.id if self.prefill else "",
            prefill_pid=self.prefill.pid if self.prefill else 0,
            decode=self.decode.id if self.decode else "",
            decode_pid=self.decode.pid if self.decode else 0,
            transfer_bytes=self.kv_bytes,
        )

    def _tpot_ms(self) -> float:
        if self.completion_tokens < 2:
            return 0.0
        return _span_ms(self.first_token, self.last_token) / (self.completion_tokens - 1)


def _span_ms(start: float | None, end: float | None) -> float:
    # KV can be complete before the first token is seen here: a stage then took no time, never a negative one.
    if start is None or end is None:
        return 0.0
    return max(0.0, (end - start) * 1000)
