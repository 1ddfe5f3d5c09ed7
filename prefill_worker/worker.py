"""The prefill worker's engine: commands in, `step()`, one update out. Runs in one thread; knows no network.

The life of a call:

    Start ──> queued ──> computing, chunk by chunk ──> Sampled ──> pushed, payload by payload ──> Done
                             │ (pages of finished chunks are pushed meanwhile)
    Cancel, a broken link or an error end it in any state: its pages are freed once, and decode is told (`Ended`).
"""

from dataclasses import dataclass

from engine.batch import Chunk
from engine.load import Engine
from engine.mailbox import Mailbox
from engine.pages import PageCounts, PagePool
from engine.sampler import Step, sample
from pdserve.errors import InvalidRequest, LinkDown, PdserveError
from pdserve.request import Token, WorkRequest, check
from prefill_worker.commands import Cancel, Command, Done, Ended, Failed, Push, PushEnded, Sampled, Start, StepUpdate
from prefill_worker.outgoing import Outgoing
from prefill_worker.scheduler import PlannedChunk, PrefillScheduler, Prompt


@dataclass(eq=False)
class _Call:
    prompt: Prompt
    outgoing: Outgoing | None
    first: Token | None = None


class PrefillWorker:
    """One engine that prefills."""

    def __init__(self, engine: Engine, chunk_tokens: int, slot_bytes: int) -> None:
        self._engine = engine
        self._layout = engine.card.kv_layout
        self._pages_per_payload = max(1, slot_bytes // self._layout.page_bytes)
        self._pool = PagePool(engine.cache.num_pages)
        self._scheduler = PrefillScheduler(self._pool, self._layout.page_tokens, chunk_tokens)
        self._commands: Mailbox[Command] = Mailbox()
        self.is_idle = True  # nothing to do before the next command
        self._calls: dict[int, _Call] = {}

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
        """The ledger; from any thread."""
        return self._pool.counts()

    def step(self) -> StepUpdate:
        """Obey, compute one plan, push what is ready."""
        update = StepUpdate()
        self._obey(update)
        plan = self._scheduler.schedule()
        if plan:
            self._compute(plan, update)
        self.is_idle = not plan
        for number, call in list(self._calls.items()):
            self._push(number, call, update)
        self._pool.check()
        return update

    def wait_for_command(self, timeout_s: float) -> None:
        """Block the engine's thread until a command is there, at most `timeout_s`."""
        self._commands.wait(timeout_s)

    def _obey(self, update: StepUpdate) -> None:
        for command in self._commands.drain():
            match command:
                case Start() as start:
                    self._start(start, update)
                case Cancel(call):
                    self._end(call, update, aborted="cancelled")
                case PushEnded() as ended:
                    self._push_ended(ended, update)

    def _check(self, request: WorkRequest) -> None:
        card, total = self._engine.card, self._pool.counts().total
        check(request, card.vocab_size, card.window)
        if self._layout.pages_for(len(request.token_ids)) > total:
            held = total * self._layout.page_tokens
            raise InvalidRequest("prompt", f"{len(request.token_ids)} tokens, this worker holds {held}")

    def _start(self, start: Start, update: StepUpdate) -> None:
        try:
            self._check(start.request)
        except InvalidRequest as error:
            update.failed.append(Failed(start.call, error))
            return
        num_pages = self._layout.pages_for(len(start.request.token_ids))
        outgoing = None
        if start.ticket is not None and start.link is not None:
            outgoing = Outgoing(start.ticket, start.link, self._layout, self._pages_per_payload, num_pages)
        prompt = Prompt(start.call, start.request)
        self._calls[start.call] = _Call(prompt, outgoing)
        self._scheduler.add(prompt)

    def _push_ended(self, ended: PushEnded, update: StepUpdate) -> None:
        call = self._calls.get(ended.call)
        if call is None or call.outgoing is None:
            return  # cancelled meanwhile; the payload's slot is free all the same
        call.outgoing.num_flying -= 1
        if ended.problem is not None:
            self._fail(ended.call, ended.problem, update)

    def _compute(self, plan: list[PlannedChunk], update: StepUpdate) -> None:
        logits = self._engine.runner.run([_as_chunk(planned) for planned in plan])
        complete = self._scheduler.advance(plan)
        steps = [Step(prompt.request, prompt.request.num_emitted) for prompt in complete]
        tokens = sample(logits, steps) if steps else []
        for prompt, token in zip(complete, tokens, strict=True):
            self._calls[prompt.call].first = token
            update.sampled.append(Sampled(prompt.call, token, prompt.length))

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
        run = outgoing.next_run(prompt.num_computed, prompt.is_computed)
        slot = outgoing.link.try_slot() if run is not None else None
        if run is None or slot is None:
            return False
        page_ids = prompt.page_ids[run.first_page : run.first_page + run.num_pages]
        num_bytes = self._engine.cache.read_pages(page_ids, slot.buffer)
        outgoing.packed(run)
        update.pushes.append(Push(number, outgoing.link, slot, num_bytes, run.pack()))
        return True

    def _fail(self, number: int, error: PdserveError, update: StepUpdate) -> None:
        update.failed.append(Failed(number, error))
        self._end(number, update, aborted=str(error))

    def _end(self, number: int, update: StepUpdate, aborted: str) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return  # a second completion is no error
        self._scheduler.remove(call.prompt)
        self._free(call.prompt)
        if call.outgoing is not None:
            update.ended.append(Ended(call.outgoing.link, call.outgoing.whole(), aborted))

    def _free(self, prompt: Prompt) -> None:
        self._pool.give_back(prompt.page_ids, prompt.call)
        prompt.page_ids = []


def _as_chunk(planned: PlannedChunk) -> Chunk:
    token_ids = planned.prompt.request.token_ids[planned.start : planned.start + planned.num_tokens]
    return Chunk(token_ids, planned.start, planned.prompt.page_ids, sample=planned.is_last)
