"""The prefill worker's engine: commands in, `step()`, one update out. Runs in one thread; knows no network.

The life of a call:

    Start ──> queued ──> computing, chunk by chunk ──> Sampled ──> pushed, payload by payload ──> Done
                             │ (pages are pushed meanwhile, by chunks and groups of layers)
    Cancel, Abort, Expel, a broken link or an error end it in any state: its pages are freed once, and decode is told.

The life of a pass: planned and begun by one step; each of the next steps computes a group of layers, so that commands
are obeyed and pages are pushed in between. A pass writes to the pages of its prompts until it is over: a prompt that
ends meanwhile keeps them until then.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.batch import Chunk
from engine.load import Engine
from engine.logprobs import score_prompt
from engine.mailbox import Mailbox
from engine.pages import PageCounts, PagePool
from engine.pilot import Pilot, pilot_of
from engine.runner import Forward
from engine.sampler import Step, sample
from pdserve.due import PATIENCE
from pdserve.errors import Draining, InvalidRequest, LegFailed, LinkDown, PdserveError, ProtocolError
from pdserve.ledger import Ledger, LedgerEntry, State
from pdserve.request import Token, check
from prefill_worker.commands import (
    Abort,
    Cancel,
    Command,
    Done,
    Drain,
    Ended,
    Expel,
    Failed,
    PromptScored,
    Push,
    PushEnded,
    Sampled,
    Start,
    StepUpdate,
)
from prefill_worker.outgoing import Outgoing, Ready, group_size
from prefill_worker.scheduler import PlannedChunk, PrefillScheduler, Prompt


@dataclass(eq=False)
class _Call:
    prompt: Prompt
    outgoing: Outgoing | None
    pilot: Pilot | None = None  # None where the request is not steered
    first: Token | None = None

    def entry(self) -> LedgerEntry:
        """Of the ledger."""
        prompt, ticket = self.prompt, self.outgoing.ticket if self.outgoing else None
        state: State = "pushing" if prompt.is_computed else "computing" if prompt.page_ids else "queued"
        pushes_to = (ticket.incarnation, ticket.counter) if ticket else None
        label, num_pages = prompt.request.label, len(prompt.page_ids)
        return LedgerEntry(prompt.call, label, state, num_pages, pushes_to=pushes_to)


@dataclass(frozen=True, eq=False)
class _Pass:
    """A forward pass under way."""

    plan: Sequence[PlannedChunk]
    forward: Forward
    group: int  # layers per step

    def chunk_of(self, prompt: Prompt) -> PlannedChunk | None:
        """What it computes of this prompt."""
        return next((chunk for chunk in self.plan if chunk.prompt is prompt), None)


class PrefillWorker:
    """One engine that prefills."""

    def __init__(
        self, engine: Engine, chunk_tokens: int, slot_bytes: int, *, verify_kv: bool = False, patience: int = PATIENCE
    ) -> None:
        self._engine = engine
        self._layout = engine.card.kv_layout
        self._slot_bytes = slot_bytes
        self._verify_kv = verify_kv
        self._pool = PagePool(engine.cache.num_pages)
        self._scheduler = PrefillScheduler(self._pool, self._layout.page_tokens, chunk_tokens, patience)
        self._commands: Mailbox[Command] = Mailbox()
        self.is_idle = True  # nothing to do before the next command
        self._calls: dict[int, _Call] = {}
        self._pass: _Pass | None = None
        self._is_draining = False

    def submit(self, command: Command) -> None:
        """Hand a command to the next step; from any thread."""
        self._commands.put(command)

    @property
    def progress(self) -> int:
        """Layers computed so far; from any thread."""
        return self._engine.runner.progress

    @property
    def num_requests(self) -> int:
        """Calls not finished; from any thread."""
        return len(self._calls)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed; from any thread."""
        return self._scheduler.queued_tokens

    def page_counts(self) -> PageCounts:
        """The ledger in numbers; from any thread."""
        return self._pool.counts()

    def ledger(self) -> Ledger:
        """Who holds which pages, and what does not add up; between two steps."""
        in_pass = [chunk.prompt for chunk in self._pass.plan] if self._pass else []  # ended ones, too
        prompts = {prompt.call: prompt for prompt in (*in_pass, *(call.prompt for call in self._calls.values()))}
        problems = self._pool.audit([(call, prompt.page_ids) for call, prompt in prompts.items()], num_promised=0)
        return Ledger(tuple(call.entry() for call in self._calls.values()), tuple(problems))

    def step(self) -> StepUpdate:
        """Compute a group of layers, obey, plan the next pass when there is none, push what is ready."""
        update = StepUpdate()
        has_computed = self._pass is not None
        if self._pass is not None:
            self._compute(self._pass, update)
        for command in self._commands.drain():
            self._obey(command, update)
        if self._pass is None and (plan := self._scheduler.schedule()):
            self._begin(plan)
        self.is_idle = self._pass is None and not has_computed
        for number, call in list(self._calls.items()):
            self._push(number, call, update)
        self._pool.check()
        return update

    def wait_for_command(self, timeout_s: float) -> None:
        """Block the engine's thread until a command is there, at most `timeout_s`."""
        self._commands.wait(timeout_s)

    def _obey(self, command: Command, update: StepUpdate) -> None:
        match command:
            case Start():
                self._start(command, update)
            case Cancel(call):
                self._end(call, update, aborted="cancelled")
            case PushEnded():
                self._push_ended(command, update)
            case Abort():
                self._abort(command, update)
            case Drain():
                self._is_draining = True
            case Expel(error):
                for number in list(self._calls):
                    self._fail(number, error, update)

    def _start(self, start: Start, update: StepUpdate) -> None:
        try:
            outgoing = self._accept(start)
            pilot = pilot_of(start.request, self._engine.card.vocab_size, self._engine.grammars)
            if pilot is not None:
                pilot.check()
        except PdserveError as error:
            update.failed.append(Failed(start.call, error))
        else:
            prompt = self._scheduler.add(start.call, start.request, start.priority)
            self._calls[start.call] = _Call(prompt, outgoing, pilot)

    def _accept(self, start: Start) -> Outgoing | None:
        """The push side of a call that can be served."""
        if self._is_draining:
            raise Draining("this prefill worker is about to leave and takes no new work")
        card, length, total = self._engine.card, len(start.request.token_ids), self._pool.counts().total
        check(start.request, card.vocab_size, card.window)
        num_pages = self._layout.pages_for(length)
        if num_pages > total:
            raise InvalidRequest("prompt", f"{length} tokens, this worker holds {total * self._layout.page_tokens}")
        if start.ticket is None or start.link is None:
            return None
        if not 0 <= start.ticket.cached_pages < num_pages:
            raise ProtocolError(f"{start.ticket} has more cached pages than a prompt of {length} tokens can have")
        return Outgoing(start.ticket, start.link, self._layout, self._slot_bytes, num_pages)

    def _push_ended(self, ended: PushEnded, update: StepUpdate) -> None:
        call = self._calls.get(ended.call)
        if call is None or call.outgoing is None:
            return  # cancelled meanwhile; the payload's slot is free all the same
        call.outgoing.num_flying -= 1
        if ended.problem is not None:
            self._fail(ended.call, ended.problem, update)

    def _abort(self, abort: Abort, update: StepUpdate) -> None:
        for number, call in list(self._calls.items()):
            if call.outgoing and call.outgoing.is_to(abort.incarnation, abort.counter):
                self._fail(number, LegFailed(f"decode wants no more of it: {abort.reason}"), update)

    def _begin(self, plan: list[PlannedChunk]) -> None:
        chunks = [Chunk(each.token_ids, each.start, each.prompt.page_ids, sample=each.is_last) for each in plan]
        forward = self._engine.runner.start(chunks)
        num_pages = sum(self._layout.pages_for(chunk.end - chunk.start) for chunk in plan)
        self._pass = _Pass(plan, forward, group_size(num_pages, self._layout, self._slot_bytes))

    def _compute(self, current: _Pass, update: StepUpdate) -> None:
        if any(chunk.prompt.call in self._calls for chunk in current.plan):
            current.forward.advance(current.group)
            if not current.forward.is_complete:
                return
            self._scheduler.advance(current.plan)
            self._score(current, update)
            self._sample(current, update)
        self._pass = None
        for chunk in current.plan:
            if chunk.prompt.call not in self._calls:
                self._free(chunk.prompt)

    def _score(self, current: _Pass, update: StepUpdate) -> None:
        first_row = 0
        for chunk in current.plan:
            request = chunk.prompt.request
            if request.scores_prompt and chunk.prompt.call in self._calls:
                token_ids = request.token_ids[chunk.start + 1 : chunk.end + 1]
                scores = score_prompt(current.forward, first_row, token_ids, request.prompt_logprobs or 0)
                update.scored.append(PromptScored(chunk.prompt.call, list(scores)))
            first_row += chunk.end - chunk.start

    def _sample(self, current: _Pass, update: StepUpdate) -> None:
        prompts = [chunk.prompt for chunk in current.plan if chunk.is_last]
        if not prompts:
            return
        logits = current.forward.logits()
        for index, prompt in enumerate(prompts):
            if call := self._calls.get(prompt.call):
                step = Step(prompt.request, prompt.request.num_emitted, call.pilot)
                (token,) = sample(logits[index : index + 1], [step])
                call.first = token if call.pilot is None else call.pilot.take(token)
                computed = prompt.length - prompt.num_cached
                update.sampled.append(Sampled(prompt.call, call.first, computed, prompt.num_cached))

    def _push(self, number: int, call: _Call, update: StepUpdate) -> None:
        """Pack what is ready into free slots; a call whose first token was its last pushes nothing more."""
        if call.outgoing is not None and not (call.first is not None and call.first.finish):
            while self._pack_one(number, call.prompt, call.outgoing, update):
                pass
            if call.outgoing.is_packed:
                self._free(call.prompt)
            elif not call.outgoing.link.is_up:
                self._fail(number, LinkDown(f"the link to {call.outgoing.ticket.worker} broke"), update)
                return
            if not call.outgoing.is_landed:
                return
        if call.first is not None:
            kv_bytes, payloads = (call.outgoing.kv_bytes, call.outgoing.num_payloads) if call.outgoing else (0, 0)
            update.done.append(Done(number, kv_bytes, payloads))
            self._end(number, update, aborted="")

    def _pack_one(self, number: int, prompt: Prompt, outgoing: Outgoing, update: StepUpdate) -> bool:
        run = outgoing.next_run(self._ready(prompt))
        slot = outgoing.link.try_slot() if run is not None else None
        if run is None or slot is None:
            return False
        page_ids = prompt.page_ids[run.first_page : run.first_page + run.num_pages]
        layers = range(run.first_layer, run.first_layer + run.num_layers)
        num_bytes = self._engine.cache.read_pages(page_ids, slot.buffer, layers)
        outgoing.packed(run)
        if self._verify_kv:
            run = replace(run, checksum=zlib.crc32(slot.buffer[:num_bytes].cpu().numpy().data))
        update.pushes.append(Push(number, outgoing.link, slot, num_bytes, run.pack()))
        return True

    def _ready(self, prompt: Prompt) -> Ready:
        whole = self._layout.pages_for(prompt.num_ready)
        if self._pass is not None and (chunk := self._pass.chunk_of(prompt)):
            return Ready(whole, self._layout.pages_for(chunk.end), self._pass.forward.num_ready)
        return Ready(whole)

    def _fail(self, number: int, error: PdserveError, update: StepUpdate) -> None:
        update.failed.append(Failed(number, error))
        self._end(number, update, aborted=str(error))

    def _end(self, number: int, update: StepUpdate, aborted: str) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return  # a second completion is no error
        self._scheduler.remove(call.prompt)
        if self._pass is None or not self._pass.chunk_of(call.prompt):
            self._free(call.prompt)
        if call.outgoing is not None:
            update.ended.append(Ended(call.outgoing.link, call.outgoing.whole(), aborted))

    def _free(self, prompt: Prompt) -> None:
        self._pool.give_back(prompt.page_ids, prompt.call)
        prompt.page_ids = []
