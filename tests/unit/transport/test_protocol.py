"""The two state machines of a link: random interleavings keep the promises, and every violation is refused."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ProtocolError
from transport.protocol import Announce, Landed, Limits, Ready, ReceiveEnd, SendEnd

LIMITS = Limits(slot_bytes=100, num_slots=4)


class Simulation:
    """Both ends, the frames between them, and the wire."""

    def __init__(self) -> None:
        self.prefill, self.decode = SendEnd(LIMITS), ReceiveEnd(LIMITS)
        self.to_decode: deque[Announce] = deque()
        self.to_prefill: deque[Ready | Landed] = deque()
        self.undecided: list[int] = []
        self.sends: deque[int] = deque()
        self.receives: deque[int] = deque()
        self.scrapped: set[int] = set()
        self.num_announced = 0
        self.landed: dict[int, bool] = {}

    def moves(self) -> list[str]:
        possible = {
            "announce": self.num_announced - len(self.landed) < LIMITS.num_slots,
            "hear_announce": self.to_decode,
            "decide": self.undecided,
            "arrive": self.sends and self.receives,
            "hear_answer": self.to_prefill,
        }
        return [move for move, is_possible in possible.items() if is_possible]

    def announce(self, pick: int) -> None:
        self.to_decode.append(self.prefill.announce(1 + pick % LIMITS.slot_bytes, b""))
        self.num_announced += 1

    def hear_announce(self, pick: int) -> None:
        frame = self.to_decode.popleft()
        self.decode.announced(frame)
        self.undecided.append(frame.seq)

    def decide(self, pick: int) -> None:
        seq = self.undecided.pop(pick % len(self.undecided))
        scrap = "dead" if pick % 3 == 0 else ""
        if scrap:
            self.scrapped.add(seq)
        self.to_prefill.append(self.decode.ready(seq, scrap))
        self.receives.append(seq)

    def arrive(self, pick: int) -> None:
        sent, received = self.sends.popleft(), self.receives.popleft()
        assert sent == received, "the wire matches by order alone"
        self.to_prefill.append(self.decode.landed(received))

    def hear_answer(self, pick: int) -> None:
        match self.to_prefill.popleft():
            case Ready() as ready:
                self.prefill.ready(ready)
                self.sends.append(ready.seq)
            case Landed() as landed:
                self.landed[landed.seq] = self.prefill.landed(landed)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=200))
def test_any_interleaving_delivers_everything_in_order(picks: list[tuple[int, int]]) -> None:
    run = Simulation()
    for which, pick in picks:
        moves = run.moves()
        getattr(run, moves[which % len(moves)])(pick)
    while rest := [move for move in run.moves() if move != "announce"]:
        getattr(run, rest[0])(0)
    assert sorted(run.landed) == list(range(run.num_announced))
    assert {seq for seq, kept in run.landed.items() if not kept} == run.scrapped


@pytest.mark.parametrize("num_bytes", [0, -1, 101, 2**63])
def test_sizes_are_checked_at_both_ends(num_bytes: int) -> None:
    with pytest.raises(ProtocolError, match="1 to 100"):
        SendEnd(LIMITS).announce(num_bytes, b"")
    with pytest.raises(ProtocolError, match="1 to 100"):
        ReceiveEnd(LIMITS).announced(Announce(0, num_bytes, b""))


def test_no_more_than_num_slots_are_outstanding() -> None:
    prefill, decode = SendEnd(LIMITS), ReceiveEnd(LIMITS)
    for _ in range(4):
        decode.announced(prefill.announce(1, b""))
    with pytest.raises(ProtocolError, match="4 payloads are outstanding"):
        prefill.announce(1, b"")
    with pytest.raises(ProtocolError, match="4 payloads are outstanding"):
        decode.announced(Announce(4, 1, b""))
    prefill.ready(decode.ready(2, ""))
    with pytest.raises(ProtocolError, match="4 payloads are outstanding"):
        prefill.announce(1, b"")  # being sent still counts
    with pytest.raises(ProtocolError, match="4 payloads are outstanding"):
        decode.announced(Announce(4, 1, b""))  # being received, too
    assert prefill.landed(decode.landed(2))
    decode.announced(prefill.announce(1, b""))


def test_what_is_out_of_turn_is_refused() -> None:
    prefill, decode = SendEnd(LIMITS), ReceiveEnd(LIMITS)
    with pytest.raises(ProtocolError):
        decode.announced(Announce(1, 1, b""))
    with pytest.raises(ProtocolError):
        prefill.ready(Ready(0, ""))
    with pytest.raises(ProtocolError):
        decode.ready(0, "")
    decode.announced(prefill.announce(1, b""))
    with pytest.raises(ProtocolError):
        prefill.landed(Landed(0))
    with pytest.raises(ProtocolError):
        decode.landed(0)
    prefill.ready(decode.ready(0, ""))
    with pytest.raises(ProtocolError):
        prefill.ready(Ready(0, ""))
    with pytest.raises(ProtocolError):
        decode.ready(0, "again")
    decode.announced(prefill.announce(1, b""))
    prefill.ready(decode.ready(1, ""))
    with pytest.raises(ProtocolError):
        prefill.landed(Landed(1))  # 0 comes first
