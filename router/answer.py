"""What the client of one request is told, token by token.

    Token -> text that is decided now (TextStream) -> Delta; the token that ends the completion also sets `finished`

A client that resumes brings tokens along: they are replayed first, through the same steps but silently, and what it
lacks of their text goes out with the next delta.
"""

from collections.abc import Iterator, Sequence

from pdserve.errors import InvalidRequest
from pdserve.request import Candidate, Scored, Token, WorkRequest, finish_after
from pdserve.v1 import generation_pb2 as pb
from router.text_stream import TextStream
from router.tokenizer import TextModel
from router.validation import Plan, ServedModel

_PROMPT_TOKENS = 128  # of one message: up to 80 kB


class Answer:
    """One completion.

    The ids of a stop string's tokens are sent, its text is not. A token that ends the completion as end-of-sequence has
    an id and no text; a stop token id keeps its text.
    """

    def __init__(self, plan: Plan, model: ServedModel) -> None:
        self.plan = plan
        self.finished: pb.Finished | None = None  # set by the token that ends the completion
        self._model = model
        self._text = TextStream(model.text, plan.stop)
        self._owed = ""  # text of replayed tokens that the client lacks

    @property
    def work(self) -> WorkRequest:
        """What the workers get."""
        return self.plan.work

    def replay(self, text_length: int) -> None:
        """Catch up with a client that has the plan's emitted tokens and so many characters. Raises InvalidRequest."""
        texts = []
        for number, token_id in enumerate(self.work.token_ids[self.work.prompt_length :]):
            if self.finished is not None:
                ending = self.finished.stop_match.WhichOneof("match")
                problem = (
                    f"ends the completion ({ending}), but more tokens follow; all else must be as in the first request"
                )
                raise InvalidRequest(f"resume.token_ids[{number - 1}]", problem)
            texts.append(self._advance(Token(number, token_id, finish=finish_after(self.work, number, token_id))))
        self._owed = "".join(texts)
        steering = self.work.steering
        if text_length > len(self._owed) and self.finished is None and steering is not None and steering.grammar:
            self.complete()  # nothing else gives text out that is withheld while more tokens may come
        if text_length > len(self._owed):
            problem = f"{text_length} is not allowed; the text of resume.token_ids has {len(self._owed)} characters"
            raise InvalidRequest("resume.text_length", problem)
        self._owed = self._owed[text_length:]

    def started(self) -> pb.Started:
        """What a client keeps to resume."""
        work, card = self.work, self._model.card
        return pb.Started(
            request_id=work.label,
            model=card.name,
            seed=work.sampling.seed,
            model_fingerprint=card.fingerprint,
            prompt_tokens=work.prompt_length,
            exact=card.exact,
            index=self.plan.index,
        )

    def delta(self, token: Token) -> pb.Delta:
        """The token's delta; the last one carries all text that was withheld."""
        text, self._owed = self._owed + self._advance(token), ""
        delta = pb.Delta(index=self.plan.index, token_number=token.number, text=text, token_ids=[token.token_id])
        if token.logprob is not None:
            scored = Scored(Candidate(token.token_id, token.logprob), token.top_logprobs)
            delta.top_logprobs.append(_top_logprobs(scored, self._model.text))
        return delta

    def prompt_logprobs(self, scores: Sequence[Scored]) -> Iterator[pb.PromptLogprobs]:
        """The messages that tell of the prompt's tokens; the same ones however prefill came by the scores."""
        for start in range(0, len(scores), _PROMPT_TOKENS):
            tokens = [_top_logprobs(scored, self._model.text) for scored in scores[start : start + _PROMPT_TOKENS]]
            yield pb.PromptLogprobs(first_position=start + 1, tokens=tokens)

    def complete(self) -> None:
        """The tokens that the client brought along complete the grammar: nothing can follow."""
        step = self._text.finish()
        self._owed += step.text
        match = pb.StopMatch(grammar=True) if step.matched is None else pb.StopMatch(stop_string=step.matched)
        self.finished = _stopped(match)

    def rest(self) -> pb.Delta:
        """The delta of a completion whose tokens the client has: text alone, perhaps none."""
        return pb.Delta(index=self.plan.index, token_number=self.work.num_emitted, text=self._owed)

    def _advance(self, token: Token) -> str:
        is_eos = token.finish == "stop_token" and token.token_id in self.plan.eos_token_ids
        text, matched = "", None
        if not is_eos:
            step = self._text.push(token.token_id)
            text, matched = step.text, step.matched
        if token.finish and matched is None:
            step = self._text.finish()
            text, matched = text + step.text, step.matched
        if matched is not None:
            self.finished = _stopped(pb.StopMatch(stop_string=matched))
        elif token.finish:
            self.finished = self._ending(token, is_eos)
        return text

    def _ending(self, token: Token, is_eos: bool) -> pb.Finished:
        if is_eos:
            return _stopped(pb.StopMatch(eos_token_id=token.token_id))
        if token.finish == "stop_token":
            return _stopped(pb.StopMatch(stop_token_id=token.token_id))
        if token.finish == "grammar":
            return _stopped(pb.StopMatch(grammar=True))
        match = pb.StopMatch(max_tokens=self.work.max_tokens)
        if self.plan.window_limited:
            match = pb.StopMatch(context_window=self.plan.window)
        return pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH, stop_match=match)


def _stopped(match: pb.StopMatch) -> pb.Finished:
    return pb.Finished(finish_reason=pb.FINISH_REASON_STOP, stop_match=match)


def _top_logprobs(scored: Scored, text: TextModel) -> pb.TopLogprobs:
    chosen, *candidates = (
        pb.TokenLogprob(token_id=one.token_id, logprob=one.logprob, text=text.token_text(one.token_id))
        for one in (scored.chosen, *scored.top)
    )
    return pb.TopLogprobs(candidates=candidates, chosen=chosen)
