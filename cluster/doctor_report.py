"""What `pdserve doctor` found, as plain data (`--json` prints just that), and how a person reads it."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.live import Live, percent
from cluster.machine import Machine, Rate
from cluster.status import aligned
from engine.floors import DecodeFloor, PrefillFloor


@dataclass(frozen=True)
class Model:
    """In the dtype in which it is served."""

    folder: str
    dtype: str
    window: int
    num_parameters: int
    stored_bytes: int
    step_bytes: int  # of weights, read by a decode step
    kv_token_bytes: int


@dataclass(frozen=True)
class Room:
    """In all decode workers together, for requests of these lengths that share no prefix."""

    prompt_tokens: int
    completion_tokens: int
    pages: tuple[int, ...]  # of each decode worker
    page_tokens: int
    source: str  # where the number of pages is from
    admitted: int  # before the first refusal
    to_the_end: int  # at their full length

    @property
    def tokens(self) -> int:
        """That fit at one time."""
        return sum(self.pages) * self.page_tokens


@dataclass(frozen=True)
class Report:
    """Everything."""

    model: Model
    machine: Machine
    prefill: tuple[PrefillFloor, ...]
    decode: tuple[DecodeFloor, ...]
    room: Room
    workers: tuple[Live, ...] | None  # those that computed something lately; None: nobody was asked


def report(found: Report) -> str:
    """Several short tables, a blank line between them."""
    parts = [_model(found.model), _rates(found.machine), _prefill(found.prefill), _decode(found.decode)]
    parts.append(_room(found.room))
    if found.workers is not None:
        parts.append(_workers(found.workers))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _model(model: Model) -> list[str]:
    size = f"{model.num_parameters / 1e6:,.1f} M parameters, {_bytes(model.stored_bytes)} in {model.dtype}"
    return [
        f"{model.folder}: {size}",
        f"a decode step reads {_bytes(model.step_bytes)} of weights; KV is {model.kv_token_bytes:,} bytes per token",
    ]


def _rates(machine: Machine) -> list[str]:
    best = {machine.limits.read_bytes_per_s, machine.limits.flops_per_s}
    rows = [(each.what, _rate(each), each.source, "limit" if each.per_s in best else "") for each in machine.rates]
    return aligned([("ONE WORKER", "RATE", "SOURCE", ""), *rows])


def _prefill(floors: Sequence[PrefillFloor]) -> list[str]:
    rows = [
        (str(each.tokens), f"{each.flops / 1e9:,.0f}", _ms(each.floor_ms), _ms(each.textbook_ms)) for each in floors
    ]
    return aligned([("PREFILL TOKENS", "GFLOP", "FLOOR MS", "TEXTBOOK MS"), *rows])


def _decode(floors: Sequence[DecodeFloor]) -> list[str]:
    head = ("DECODE BATCH", "CONTEXT", "READS", "READ MS", "COMPUTE MS", "FLOOR MS", "TOKENS/S", "TEXTBOOK MS")
    return aligned([head, *map(_decode_row, floors)])


def _decode_row(each: DecodeFloor) -> tuple[str, ...]:
    times = (each.read_ms, each.compute_ms, each.floor_ms)
    rate, textbook = f"{each.tokens_per_s:,.0f}", _ms(each.textbook_ms)
    return (str(each.batch), str(each.context), _bytes(each.read_bytes), *map(_ms, times), rate, textbook)


def _room(room: Room) -> list[str]:
    pages = f"{' + '.join(map(str, room.pages))} pages of {room.page_tokens} tokens ({room.source})"
    lengths = f"requests of {room.prompt_tokens} + {room.completion_tokens} tokens"
    if not room.admitted:
        return [f"decode: {pages} hold {room.tokens:,} tokens", f"{lengths} do not fit"]
    return [
        f"decode: {pages} hold {room.tokens:,} tokens",
        f"{lengths}: {room.admitted} are admitted at once, {room.to_the_end} reach their end without one giving way",
    ]


def _workers(workers: Sequence[Live]) -> list[str]:
    if not workers:
        return ["no worker has computed anything lately: look while there is load"]
    head = ("WORKER", "ROLE", "BUSY", "TOKENS/S", "ROWS/PASS", "PASS MS", "FLOOR MS", "OF FLOOR", "MFU", "MBU")
    return aligned([head, *map(_worker_row, workers)])


def _worker_row(each: Live) -> tuple[str, ...]:
    passes = ("-", "-", "-")
    if each.pass_tokens is not None and each.pass_ms is not None:
        passes = (f"{each.pass_tokens:.1f}", _ms(each.pass_ms), _ms(each.pass_ms * each.of_floor))
    shares = map(percent, (each.of_floor, each.mfu, each.mbu))
    return (each.worker, each.role, percent(each.busy), f"{each.tokens_per_s:,.1f}", *passes, *shares)


def _rate(rate: Rate) -> str:
    scale, prefix = (1e12, "T") if rate.per_s >= 1e12 else (1e9, "G")
    return f"{rate.per_s / scale:,.2f} {prefix}{rate.unit}"


def _bytes(count: float) -> str:
    scale, unit = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / scale:,.2f} {unit}"


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"
