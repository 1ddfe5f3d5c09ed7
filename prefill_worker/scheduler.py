"""Which prompt tokens the next step computes: first come, first served, under a token budget. Plain Python.

    waiting ──(pages taken)──> computing ──(last chunk)──> computed

A chunk is a run of consecutive prompt tokens of one sequence; a step computes chunks of at most `budget` tokens.
"""

from collections import deque
from dataclasses import dataclass, field

from engine.pages import PagePool
from pdserve.request import WorkRequest


@dataclass(eq=False)
class Prompt:
    """One sequence on its way through the scheduler."""

    call: int
    request: WorkRequest
    page_ids: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def length(self) -> int:
        """Tokens to compute in all."""
        return len(self.request.token_ids)

    @property
    def is_computed(self) -> bool:
        """Whether all KV of the prompt is in the pages."""
        return self.num_computed == self.length


@dataclass(frozen=True)
class PlannedChunk:
    """The next `num_tokens` tokens of a prompt."""

    prompt: Prompt
    num_tokens: int

    @property
    def start(self) -> int:
        """Position of the first token, before `advance`."""
        return self.prompt.num_computed

    @property
    def is_last(self) -> bool:
        """Whether the prompt is computed after this chunk."""
        return self.start + self.num_tokens == self.prompt.length


class PrefillScheduler:
    """The queue of prompts of one engine."""

    def __init__(self, pool: PagePool, page_tokens: int, budget: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._budget = budget
        self._queue: deque[Prompt] = deque()

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed."""
        return sum(prompt.length - prompt.num_computed for prompt in list(self._queue))

    def add(self, prompt: Prompt) -> None:
        """Put a prompt at the end of the queue."""
        self._queue.append(prompt)

    def remove(self, prompt: Prompt) -> None:
        """Take a prompt out, wherever it is; its pages stay its own."""
        if prompt in self._queue:
            self._queue.remove(prompt)

    def schedule(self) -> list[PlannedChunk]:
        """The chunks of the next step, oldest prompt first; empty when nothing waits or no page is free."""
        plan: list[PlannedChunk] = []
        budget = self._budget
        for prompt in self._queue:
            if budget == 0 or not self._has_pages(prompt):
                break
            num_tokens = min(budget, prompt.length - prompt.num_computed)
            plan.append(PlannedChunk(prompt, num_tokens))
            budget -= num_tokens
        return plan

    def _has_pages(self, prompt: Prompt) -> bool:
        num_pages = -(-prompt.length // self._page_tokens)
        if not prompt.page_ids and num_pages <= self._pool.available:
            prompt.page_ids = self._pool.take(num_pages, prompt.call)
        return bool(prompt.page_ids)

    def advance(self, plan: list[PlannedChunk]) -> list[Prompt]:
        """Note that a plan was computed; returns the prompts that are complete, in the order of their logits."""
        for chunk in plan:
            chunk.prompt.num_computed += chunk.num_tokens
        complete = [chunk.prompt for chunk in plan if chunk.prompt.is_computed]
        for prompt in complete:
            self._queue.remove(prompt)
        return complete
