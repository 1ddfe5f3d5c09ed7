"""Who may try next."""

import asyncio

import pytest

from pdserve.errors import QueueFull
from router.waiting_room import Seat, WaitingRoom


def enter(room: WaitingRoom, priority: int, *, resumes: bool = False) -> Seat:
    return room.enter(room.arrive(priority), resumes=resumes)


async def test_lower_priority_numbers_go_first_then_age() -> None:
    room = WaitingRoom(10)
    late, early_low, first = enter(room, 5), enter(room, 5), enter(room, 0)
    order = []
    for _ in range(3):
        seat = next(seat for seat in (late, early_low, first) if not seat.has_left and room.is_first(seat))
        order.append(seat)
        room.leave(seat)
    assert order == [first, late, early_low]


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
    room.enter(room.arrive(0), resumes=False, follows=True)
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
    new, old, young = room.arrive(1), room.arrive(1), room.arrive(1)
    urgent, last = enter(room, 0), room.enter(new, resumes=False)
    second, first = room.enter(young, resumes=True), room.enter(old, resumes=True)  # whatever the limit
    order = []
    for _ in range(4):
        seat = next(seat for seat in (last, urgent, second, first) if not seat.has_left and room.is_first(seat))
        order.append(seat)
        room.leave(seat)
    assert order == [urgent, first, second, last]
