"""Which prompt tokens the next pass computes, under a token budget: shortest first, with ageing. Plain Python.

    waiting ──(pages taken, known prefix pinned)──> computing ──(last chunk)──> computed

A chunk is a run of consecutive prompt tokens of one sequence; a pass computes chunks of at most `budget` tokens. All
but a prompt's last one end where a page ends. Before each of its chunks a prompt takes over the pages that others have
published meanwhile; if the page that it needs next is in the very plan that is being made, it waits for the next one.
So prompts that arrive together compute what they share once.

Order: priority, then what goes on after a fault before what is new, then who is due (see pdserve.due), where fewer
tokens left are due sooner. It is looked at for every pass: a long prompt gives way when its chunk is computed, and
keeps its pages meanwhile.

A prompt takes all its pages at once: two that hold half of what they need could wait for each other for ever. Who has
none waits behind the first one that waits for pages; who has them goes on, so that they come back. Those that come
before that first one take pages before it, but they are bounded as all overtaking is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.pages import PagePool
from pdserve.due import Arrivals
from pdserve.errors import NoCapacity
from pdserve.prefix import prompt_hashes
from pdserve.request import WorkRequest


@dataclass(eq=False)
class Prompt:
    """One sequence on its way through the scheduler."""

    call: int
    request: WorkRequest
    hashes: Sequence[bytes]  # of its whole pages
    priority: int = 0  # lower goes first
    place: int = 0  # in order of arrival
    num_known: int = 0  # tokens that were cached when it came
    page_ids: list[int] = field(default_factory=list)
    num_ready: int = 0  # tokens whose KV is in the pages
    num_cached: int = 0  # of them, not computed for this prompt

    @property
    def length(self) -> int:
        """Tokens in all."""
        return len(self.request.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that are still to be computed, as far as one knows: what is cached may be evicted before its turn."""
        return self.length - max(self.num_ready, self.num_known)

    @property
    def is_computed(self) -> bool:
        """Whether all KV of the prompt is in the pages."""
        return self.num_ready == self.length


@dataclass(frozen=True)
class PlannedChunk:
    """The next tokens of a prompt, `start` up to `end`."""

    prompt: Prompt
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is computed after this chunk."""
        return self.end == self.prompt.length

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens."""
        return self.prompt.request.token_ids[self.start : self.end]


class PrefillScheduler:
    """The queue of prompts of one engine."""

    def __init__(self, pool: PagePool, page_tokens: int, budget: int, patience: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._budget = max(budget, page_tokens)
        self._arrivals = Arrivals(patience)
        self._queue: list[Prompt] = []

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed; from any thread."""
        return sum(prompt.length - prompt.num_ready for prompt in list(self._queue))

    def add(self, call: int, request: WorkRequest, priority: int = 0) -> Prompt:
        """Put a prompt into the queue."""
        hashes = prompt_hashes((*request.token_ids, 0), self._page_tokens)  # one more token: of the last page as well
        prompt = Prompt(call, request, hashes, priority)
        prompt.num_known = len(self._pool.find(self._wanted(prompt))) * self._page_tokens
        prompt.place = self._arrivals.add(prompt.num_left)
        self._queue.append(prompt)
        return prompt

    def _rank(self, prompt: Prompt) -> tuple[int, bool, int, int]:
        """Who goes first: the least."""
        due = self._arrivals.due(prompt.place, prompt.num_left)
        return prompt.priority, not prompt.request.num_emitted, due, prompt.place

    def remove(self, prompt: Prompt) -> None:
        """Take a prompt out, wherever it is; its pages stay its own."""
        if prompt in self._queue:
            self._queue.remove(prompt)

    def schedule(self) -> list[PlannedChunk]:
        """The chunks of the next pass, in order of rank; empty when nothing waits or no page is free.

        The plan before must be through: `advance`, or dropped.
        """
        plan: list[PlannedChunk] = []
        budget, has_room = self._budget, True
        coming: set[bytes] = set()  # pages that this plan computes
        for prompt in sorted(self._queue, key=self._rank):
            wanted = self._wanted(prompt)
            known = len(self._pool.find(wanted))
            end = self._chunk_end(prompt, known, budget)
            if end is None:
                break
            if not coming.isdisjoint(wanted[known : known + 1]) or not (has_room or prompt.page_ids):
                continue
            if not self._take_over(prompt, known):
                has_room = False  # nobody behind the first one that waits for pages takes any
                continue
            plan.append(PlannedChunk(prompt, prompt.num_ready, end))
            budget -= end - prompt.num_ready
            coming.update(prompt.hashes[prompt.num_ready // self._page_tokens : end // self._page_tokens])
        return plan

    def _wanted(self, prompt: Prompt) -> Sequence[bytes]:
        """Pages that need not be computed where others have; a prompt whose tokens are scored computes all of them."""
        if prompt.request.scores_prompt:
            return ()
        return prompt.hashes[prompt.num_ready // self._page_tokens : (prompt.length - 1) // self._page_tokens]

    def _chunk_end(self, prompt: Prompt, known: int, budget: int) -> int | None:
        """Where the next chunk ends if `known` pages need not be computed; None if the budget leaves none."""
        start = prompt.num_ready + known * self._page_tokens
        if start + budget >= prompt.length:
            return prompt.length if budget else None
        end = (start + budget) // self._page_tokens * self._page_tokens
        return end if end > start else None

    def _take_over(self, prompt: Prompt, known: int) -> bool:
        """Hold the next `known` pages together with others; the first time take all the rest. False: no room."""
        first = prompt.num_ready // self._page_tokens
        if prompt.page_ids:
            own = slice(first, first + known)
            self._pool.give_back(prompt.page_ids[own], prompt.call)
            prompt.page_ids[own] = self._pool.reserve(prompt.hashes[own], known, prompt.call)
        elif not self._take_pages(prompt, known):
            return False
        prompt.num_ready += known * self._page_tokens
        prompt.num_cached += known * self._page_tokens
        return True

    def _take_pages(self, prompt: Prompt, known: int) -> bool:
        num_pages = -(-prompt.length // self._page_tokens)
        try:
            pinned = self._pool.reserve(prompt.hashes[:known], num_pages, prompt.call)
        except NoCapacity:
            return False
        prompt.page_ids = [*pinned, *self._pool.take_promised(num_pages - known, prompt.call)]
        return True

    def advance(self, plan: Sequence[PlannedChunk]) -> None:
        """Note that a plan was computed: its whole pages can be found from now on."""
        for chunk in plan:
            prompt = chunk.prompt
            for index in range(chunk.start // self._page_tokens, chunk.end // self._page_tokens):
                self._pool.publish(prompt.page_ids[index], prompt.hashes[index])
            prompt.num_ready = chunk.end
            if prompt.is_computed:
                self.remove(prompt)
