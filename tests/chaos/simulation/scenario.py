"""From a seed: sizes, requests, faults. The same seed gives the same scenario on every machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from pdserve.request import Sampling, WorkRequest
from tests.chaos.simulation.client import Job
from tests.chaos.simulation.fake_engine import PAGE_TOKENS, VOCAB_SIZE, WINDOW, layout, undisturbed
from tests.chaos.simulation.faults import Fault, FaultMaker
from tests.chaos.simulation.network import Weather
from tests.chaos.simulation.shape import Shape
from transport.base import LinkConfig

FIRST_S = 0.6  # everything is up by then
ARRIVALS_S = (0.05, 0.3, 0.8)
MAX_FAULTS = 4  # as many as a request outlives in any case: see router.recovery


@dataclass(frozen=True)
class Scenario:
    """All that a run is made of."""

    seed: int
    shape: Shape
    jobs: tuple[Job, ...]
    faults: tuple[Fault, ...]

    @property
    def may_fail(self) -> bool:
        """Whether a request may be given up: more happens to it than it must outlive."""
        return len(self.faults) > MAX_FAULTS


def scenario(seed: int) -> Scenario:
    """Draw everything."""
    random = Random(seed)
    shape = _tight(random, _shape(random)) if random.random() < 0.25 else _shape(random)
    jobs = tuple(_Mix(random, shape).jobs(random.randint(2, 8)))
    return Scenario(seed, shape, jobs, tuple(_faults(random, shape, jobs)))


def _shape(random: Random) -> Shape:
    chunk = random.choice((4, 6, 8, 16, 32))
    link = LinkConfig(
        slot_bytes=random.choice((1, 1, 2, 4, 8)) * layout().page_bytes,
        num_slots=random.randint(1, 4),
        op_timeout_s=1.0,
        push_timeout_s=5.0,
    )
    return Shape(
        routers=random.choice((1, 1, 2)),
        prefills=random.choice((1, 1, 2, 3)),
        decodes=random.choice((1, 2, 2, 3)),
        prefill_pages=random.randint(10, 32),
        decode_pages=random.choice((random.randint(8, 14), random.randint(10, 40))),
        block_tokens=random.choice((1, 2, 4, 8, 64)),
        chunk_tokens=chunk,
        max_batch=random.choice((1, 2, 8)),
        link=link,
        weather=_weather(random),
        verify_kv=random.random() < 0.5,
        same_address=random.random() < 0.5,
    )


def _tight(random: Random, shape: Shape) -> Shape:
    """Too few pages for what runs: somebody has to give way."""
    pages, block_tokens = random.randint(8, 12), random.choice((1, 2))
    return replace(shape, decodes=1, decode_pages=pages, prefill_pages=16, block_tokens=block_tokens, max_batch=8)


def _weather(random: Random) -> Weather:
    longest = random.choice((0.001, 0.004, 0.03))
    return Weather((0.0002, longest), (0.0, random.choice((0.01, 0.3))), random.randint(1, 6))


def _faults(random: Random, shape: Shape, jobs: Sequence[Job]) -> list[Fault]:
    """Most of them while some request is under way."""
    count = random.choice((0, 1, 1, 2, 2, 2, 3, 3, MAX_FAULTS, random.randint(6, 12)))
    names = (
        [f"{role}-{number}" for number in range(num)]
        for role, num in (("prefill", shape.prefills), ("decode", shape.decodes), ("router", shape.routers))
    )
    maker = FaultMaker(random, *names)
    times = sorted(random.choice(jobs).at_s + random.uniform(0.0, 0.4) for _ in range(count))
    return [maker.make(at_s, verify_kv=shape.verify_kv) for at_s in times]


class _Mix:
    """Requests that have something to do with each other."""

    def __init__(self, random: Random, shape: Shape) -> None:
        self._random = random
        self._most = min(shape.prefill_pages, shape.decode_pages, WINDOW // PAGE_TOKENS) * PAGE_TOKENS
        self._chunk = shape.chunk_tokens
        self._prefixes = [self._tokens(random.choice((4, 8, 11, 16))) for _ in range(2)]
        self._made: list[Job] = []

    def jobs(self, count: int) -> list[Job]:
        """So many, in the order of their arrival."""
        within_s = self._random.choice(ARRIVALS_S)
        times = sorted(FIRST_S + self._random.uniform(0.0, within_s) for _ in range(count))
        for number, at_s in enumerate(times):
            self._made.append(self._job(number, at_s))
        return self._made

    def _job(self, number: int, at_s: float) -> Job:
        random = self._random
        prompt = self._prompt()[: self._most - 1]
        room = self._most - len(prompt)
        max_tokens = min(
            room, random.choice((1, 2, 3, random.randint(4, 12), random.randint(8, 24), random.randint(16, 48)))
        )
        sampling = Sampling(0.0) if random.random() < 0.4 else self._sampling()
        stops = frozenset(random.sample(range(VOCAB_SIZE), random.choice((0, 0, 1, 2))))
        min_tokens = random.choice((0, 0, min(3, max_tokens)))
        work = WorkRequest(f"job {number}", prompt, len(prompt), sampling, max_tokens, min_tokens, stops)
        return self._with_manners(Job(number, at_s, work, tuple(undisturbed(work)), random.choice((0, 0, 0, 1))))

    def _sampling(self) -> Sampling:
        random = self._random
        top_k, top_p = random.choice((0, 5)), random.choice((1.0, 0.9))
        return Sampling(random.uniform(0.3, 1.5), top_k, top_p, 0.0, random.getrandbits(63))

    def _with_manners(self, job: Job) -> Job:
        random = self._random
        leaves = random.randint(1, len(job.answer)) if random.random() < 0.12 else None
        cancels = random.uniform(0.0, 0.6) if random.random() < 0.12 else None
        deadline = random.uniform(0.1, 3.0) if random.random() < 0.1 else None
        return Job(job.number, job.at_s, job.work, job.answer, job.priority, leaves, cancels, deadline)

    def _prompt(self) -> tuple[int, ...]:
        random, page = self._random, PAGE_TOKENS
        kind = random.random()
        if self._made and kind < 0.15:
            return random.choice(self._made).work.token_ids
        if self._made and kind < 0.35:  # the next turn of a chat
            before = random.choice(self._made)
            return (*before.work.token_ids, *(token.token_id for token in before.answer), *self._tokens(3))
        if kind < 0.6:
            return (*random.choice(self._prefixes), *self._tokens(random.randint(1, 9)))
        lengths = (1, page - 1, page, page + 1, 2 * page, self._chunk, self._chunk + 1, random.randint(2, 40))
        return self._tokens(random.choice(lengths))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(VOCAB_SIZE) for _ in range(count))
