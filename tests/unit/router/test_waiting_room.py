"""Who may try next."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import QueueFull
from router.waiting_room import Seat, WaitingRoom


def enter(room: WaitingRoom, priority: int, num_tokens: int = 10) -> Seat:
    return room.enter(room.arrive(priority, num_tokens), resumes=False)


def served(room: WaitingRoom, *seats: Seat) -> list[Seat]:
    """In order."""
    order = []
    while waiting := [seat for seat in seats if not seat.has_left]:
        order += [seat for seat in waiting if room.is_first(seat)]
        room.leave(order[-1])
    return order


async def test_lower_priority_numbers_go_first_then_age() -> None:
    room = WaitingRoom(10)
    late, early_low, first = enter(room, 5), enter(room, 5), enter(room, 0)
    assert served(room, late, early_low, first) == [first, late, early_low]


async def test_the_shortest_goes_first_until_others_have_waited_long_enough() -> None:
    room = WaitingRoom(100, patience=3)
    long = enter(room, 0, 200)
    early = [enter(room, 0, 40) for _ in range(12)]  # 480 tokens came after the long one: less than 3 x (200 - 40)
    late, urgent = enter(room, 0, 40), enter(room, -1, 200)
    assert served(room, late, long, urgent, *early) == [urgent, *early[:11], long, early[11], late]


async def test_without_patience_the_first_that_came_goes_first() -> None:
    room = WaitingRoom(100, patience=0)
    seats = [enter(room, 0, num_tokens) for num_tokens in (50, 3, 20, 0, 1)]
    assert served(room, *reversed(seats)) == seats


@given(st.lists(st.one_of(st.none(), st.integers(1, 50)), max_size=40), st.integers(0, 5))
def test_nobody_is_overtaken_by_more_than_patience_times_its_length(events: list[int | None], patience: int) -> None:
    room = WaitingRoom(100, patience)
    waiting: list[tuple[Seat, int]] = []  # in order of arrival
    overtaken = Counter[int]()
    for num_tokens in (*events, *events):
        if num_tokens is not None:
            waiting.append((enter(room, 0, num_tokens), num_tokens))
        elif waiting:
            index = next(index for index, (seat, _) in enumerate(waiting) if room.is_first(seat))
            seat, num_served = waiting.pop(index)
            room.leave(seat)
            for other, length in waiting[:index]:
                overtaken[id(other)] += num_served
                assert overtaken[id(other)] <= patience * length


async def test_a_full_room_says_when_to_try_again() -> None:
    room = WaitingRoom(2)
    enter(room, 0)
    seat = enter(room, 0)
    with pytest.raises(QueueFull, match="2 requests wait already") as caught:
        enter(room, -1)
    assert caught.value.retry_after_s > 0
    room.leave(seat)
    enter(room, 0)


async def test_a_full_room_lets_further_choices_of_a_request_in() -> None:
    room = WaitingRoom(1)
    enter(room, 0)
    room.enter(room.arrive(0, 1), resumes=False, follows=True)
    assert len(room) == 2


async def test_only_the_first_gets_a_turn_and_a_leaver_lets_the_next_in() -> None:
    room = WaitingRoom(10)
    first, second = enter(room, 0), enter(room, 0)
    turn = asyncio.create_task(room.turn(second))
    await room.turn(first)
    room.poke()
    await asyncio.sleep(0)
    assert not turn.done()
    room.leave(first)
    await asyncio.wait_for(turn, 1)


async def test_a_newcomer_of_higher_priority_overtakes_one_who_waits_for_room() -> None:
    room = WaitingRoom(10)
    waiting = enter(room, 1)
    await room.turn(waiting)
    urgent = enter(room, 0)
    await asyncio.wait_for(room.turn(urgent), 1)
    assert not room.is_first(waiting)
    room.leave(urgent)
    await asyncio.wait_for(room.turn(waiting), 1)


async def test_those_who_left_behind_the_first_are_forgotten() -> None:
    room = WaitingRoom(10)
    first, last = enter(room, 0), enter(room, 2)
    for _ in range(1000):
        room.leave(enter(room, 1))
    assert len(room) == 2
    assert len(room._line) < 30
    assert room.is_first(first)
    room.leave(first)
    assert room.is_first(last)


async def test_a_resumed_request_goes_before_new_ones_of_its_priority_and_keeps_its_age() -> None:
    room = WaitingRoom(2)
    new, old, young = room.arrive(1, 10), room.arrive(1, 10), room.arrive(1, 10)
    urgent, last = enter(room, 0), room.enter(new, resumes=False)
    second, first = room.enter(young, resumes=True), room.enter(old, resumes=True)  # whatever the limit
    assert served(room, last, urgent, second, first) == [urgent, first, second, last]
