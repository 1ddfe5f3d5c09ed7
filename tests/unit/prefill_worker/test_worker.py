"""A prefill worker step by step: groups of layers, shared prefixes, and an end in every state."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Chunk
from engine.load import Engine
from engine.sampler import Step, sample
from pdserve.errors import Draining, LegFailed, LinkDown, ProtocolError
from pdserve.request import Incarnation, Token, WorkRequest
from prefill_worker.commands import Abort, Command, Done, Drain, Expel, Start
from tests.toy import toy_engine, write_toy_model
from tests.unit.prefill_worker.stand import INCARNATION, Stand, prompt

NUM_PAGES = 64


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    folder: Path = write_toy_model(tmp_path_factory.mktemp("toy"))
    return toy_engine(folder, num_pages=NUM_PAGES), toy_engine(folder, num_pages=NUM_PAGES)


@pytest.fixture
def engine(engines: tuple[Engine, Engine]) -> Engine:
    engines[0].cache.pages.fill_(float("nan"))  # whoever reads what nobody has written is found out
    return engines[0]


@pytest.fixture
def other(engines: tuple[Engine, Engine]) -> Engine:
    """For references."""
    return engines[1]


def reference(engine: Engine, work: WorkRequest) -> tuple[Token, list[bytes]]:
    """First token and pages of one undisturbed forward."""
    layout = engine.card.kv_layout
    page_ids = list(range(layout.pages_for(len(work.token_ids))))
    logits = engine.runner.run([Chunk(work.token_ids, 0, page_ids, sample=True)])
    parts = engine.cache.pages[page_ids].flatten(2).flatten(0, 1)
    return sample(logits, [Step(work, work.num_emitted)])[0], [part.numpy().tobytes() for part in parts]


def test_layers_go_in_groups_in_order_over_a_slow_link(engine: Engine, other: Engine) -> None:
    stand = Stand(engine, is_slow=True)
    work = prompt(192)  # three chunks of four pages, two pages to a slot: a layer at a time
    stand.start(0, work)
    for _ in range(12):
        stand.step()
    assert stand.sampled[0].token == reference(other, work)[0], "computing goes on while the link is full"
    assert len(stand.flying) == 4
    assert not stand.link.free
    while 0 not in stand.done:
        stand.land()
        stand.step()
    chunk = [(first, layer) for first in (0, 4) for layer in range(3)]
    assert [(run.first_page, run.first_layer) for run in stand.runs[100]][:5] == chunk[:5]
    assert stand.received(0) == reference(other, work)[1]
    assert stand.done[0].kv_bytes == 12 * stand.layout.page_bytes
    stand.assert_clean()


def test_layers_are_pushed_while_the_next_ones_are_computed(engine: Engine) -> None:
    stand = Stand(engine)
    stand.start(0, prompt(64))
    seen = []
    for _ in range(4):
        stand.step()
        seen.append([run.first_layer for run in stand.runs[100]])
    assert seen == [[], [0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_a_small_prompt_is_one_payload(engine: Engine, length: int) -> None:
    stand = Stand(engine)
    stand.start(0, prompt(length))
    stand.run()
    assert stand.done[0].payloads == 1
    stand.assert_clean()


@pytest.mark.parametrize("length", [100, 112, 113])
def test_a_known_prefix_changes_no_bit_and_is_pushed_while_the_rest_is_computed(
    engine: Engine, other: Engine, length: int
) -> None:
    stand = Stand(engine)
    work = prompt(length, kind=1, shared=70)
    stand.start(0, prompt(80))
    stand.run()
    stand.start(1, work)
    stand.step()
    assert {run.first_page for run in stand.runs[101]} == {0, 2}, "cached pages go at once, two to a slot"
    assert 1 not in stand.sampled
    stand.run()
    token, pages = reference(other, work)
    assert (stand.sampled[1].token, stand.sampled[1].cached_tokens) == (token, 64)
    assert stand.sampled[1].computed_tokens == length - 64
    whole = 3 * (length // 16)
    assert stand.received(1)[:whole] == pages[:whole]
    assert len(stand.received(1)) == len(pages)
    stand.assert_clean()


def test_a_shared_prompt_is_computed_once_though_all_arrive_together(engine: Engine, other: Engine) -> None:
    stand = Stand(engine)
    works = [prompt(310, kind=kind, shared=300) for kind in range(32)]  # 21 pages each, of 64
    for call, work in enumerate(works):
        stand.start(call, work)
    stand.run()
    assert sum(each.computed_tokens for each in stand.sampled.values()) == 310 + 31 * 22
    assert sum(each.cached_tokens for each in stand.sampled.values()) == 31 * 288
    for call in (0, 1, 31):
        assert stand.sampled[call].token == reference(other, works[call])[0]
    stand.assert_clean()


@pytest.mark.parametrize(("length", "cached_pages"), [(100, 6), (97, 6), (96, 5), (100, 3)])
def test_what_decode_holds_is_not_pushed(engine: Engine, other: Engine, length: int, cached_pages: int) -> None:
    stand = Stand(engine)
    stand.start(0, prompt(length), cached_pages=cached_pages)
    stand.run()
    num_pages = stand.layout.pages_for(length)
    assert stand.done[0].kv_bytes == (num_pages - cached_pages) * stand.layout.page_bytes
    assert min(run.first_page for run in stand.runs[100]) == cached_pages
    assert len(stand.received(0)) == 3 * (num_pages - cached_pages)
    assert stand.received(0)[0] == reference(other, prompt(length))[1][3 * cached_pages] or length % 16
    stand.assert_clean()


def test_a_ticket_that_cannot_be_is_refused(engine: Engine) -> None:
    stand = Stand(engine)
    stand.start(0, prompt(20), cached_pages=2)
    stand.step()
    assert isinstance(stand.failed[0], ProtocolError)
    stand.assert_clean()


def test_a_prompt_that_never_fits_is_refused_with_the_numbers(tmp_path: Path) -> None:
    stand = Stand(toy_engine(write_toy_model(tmp_path), num_pages=4))
    for call, length in enumerate((64, 65)):
        stand.start(call, prompt(length))
    stand.run()
    assert (list(stand.done), str(stand.failed[1])) == ([0], "prompt: 65 tokens, this worker holds 64")


def test_a_cancel_in_the_middle_of_a_pass_keeps_its_pages_until_the_pass_is_over(engine: Engine, other: Engine) -> None:
    stand = Stand(engine)
    for call in (0, 1):
        stand.start(call, prompt(32, kind=call))
    for _ in range(2):
        stand.step()  # a pass of two prompts, one layer of three
    stand.cancel(0)
    stand.start(2, prompt(62 * 8, kind=2, max_tokens=1))  # would take its pages, too
    stand.step()
    assert stand.worker.page_counts().in_use == 4
    assert [entry.number for entry in stand.worker.ledger().entries] == [1, 2]
    stand.run()
    assert stand.ended == {100: "cancelled", 101: "", 102: ""}
    assert stand.sampled.keys() == {1, 2}
    assert stand.received(1) == reference(other, prompt(32, kind=1))[1]
    stand.assert_clean()


def test_a_pass_that_nobody_waits_for_is_dropped(engine: Engine) -> None:
    stand = Stand(engine)
    stand.start(0, prompt(64))
    for _ in range(2):
        stand.step()
    stand.cancel(0)
    stand.step()
    progress = stand.worker.progress
    stand.run()
    assert stand.worker.progress == progress
    assert stand.worker.page_counts().cached == 0, "half a page is not to be found"
    stand.assert_clean()


@pytest.mark.parametrize("num_steps", range(9))
@pytest.mark.parametrize("how", ["cancel", "abort", "expel", "scrap", "link"])
def test_an_end_in_every_state_frees_everything(engine: Engine, num_steps: int, how: str) -> None:
    stand = Stand(engine, is_slow=True)
    stand.start(0, prompt(80))
    for _ in range(num_steps):
        stand.step()
    if how == "cancel":
        stand.cancel(0)
    elif how == "abort":
        stand.worker.submit(Abort(INCARNATION, 100, "tired"))
        stand.worker.submit(Abort(INCARNATION, 100, "tired"))
    elif how == "expel":
        stand.worker.submit(Expel(Draining("go")))
    elif how == "scrap" and stand.flying:
        stand.land(LegFailed("scrapped"))
    elif how == "link":
        stand.link.is_up = False
        while stand.flying:
            stand.land(LinkDown("cut"))
    stand.step()
    expected = {"cancel": None, "abort": LegFailed, "expel": Draining, "scrap": LegFailed, "link": LinkDown}[how]
    if expected and (how != "scrap" or num_steps > 1):
        assert type(stand.failed[0]) is expected
    stand.run()
    stand.assert_clean()


def test_a_worker_is_not_idle_while_a_prompt_waits_for_pages_that_are_free(tmp_path: Path) -> None:
    stand = Stand(toy_engine(write_toy_model(tmp_path), num_pages=40))
    for call in range(3):
        stand.worker.submit(Start(call, prompt(496, kind=call, max_tokens=1)))  # 31 pages: one at a time
    stand.step()
    while not stand.worker.is_idle:
        stand.step()
    assert list(stand.done.values()) == [Done(call, kv_bytes=0, payloads=0) for call in range(3)]
    stand.worker.wait_for_command(0.01)  # no longer than that


def test_an_abort_of_another_incarnation_or_ticket_is_ignored(engine: Engine) -> None:
    stand = Stand(engine)
    stand.start(0, prompt(20))
    stand.worker.submit(Abort(Incarnation("old"), 100, ""))
    stand.worker.submit(Abort(INCARNATION, 7, ""))
    stand.run()
    assert stand.done.keys() == {0}


def test_a_draining_worker_finishes_and_takes_nothing_new(engine: Engine) -> None:
    stand = Stand(engine)
    stand.start(0, prompt(20))
    stand.worker.submit(Drain())
    stand.start(1, prompt(20, kind=1))
    stand.run()
    assert stand.done.keys() == {0}
    assert isinstance(stand.failed[1], Draining)
    stand.assert_clean()


def test_the_ledger_names_states_pages_and_tickets(engine: Engine) -> None:
    stand = Stand(engine, is_slow=True)
    for call, work in enumerate((prompt(150), prompt(170, kind=1))):
        stand.start(call, work)
    stand.step()
    states = [(each.number, each.state, each.num_pages) for each in stand.worker.ledger().entries]
    assert states == [(0, "computing", 10), (1, "queued", 0)]
    for _ in range(30):
        stand.step()
    entries = stand.worker.ledger().entries
    assert [(each.label, each.state, each.pushes_to) for each in entries] == [
        ("r0", "pushing", (INCARNATION, 100)),
        ("r1", "pushing", (INCARNATION, 101)),
    ]


Action = tuple[str, int, int]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "local", "cancel", "abort", "land", "land", "scrap", "step", "step"]),
            st.integers(0, 7),
            st.integers(1, 200),
        ),
        max_size=60,
    )
)
def test_the_ledger_holds_whatever_happens(engines: tuple[Engine, Engine], actions: list[Action]) -> None:
    stand = Stand(engines[0], is_slow=True)
    for number, (action, kind, length) in enumerate(actions):
        commands: list[Command] = []
        if action == "start":
            work = prompt(length, kind=kind, shared=100, emitted=kind % 2 if length > 1 else 0)
            stand.start(number, work, cached_pages=min(kind, (length - 1) // 16))
        elif action == "local":
            commands.append(Start(number, prompt(length, kind=kind, max_tokens=1)))
        elif action == "cancel":
            stand.cancel(length % (number + 1))
        elif action == "abort":
            commands.append(Abort(INCARNATION, 100 + length % (number + 1), ""))
        elif action in ("land", "scrap") and stand.flying:
            stand.land(LegFailed("scrapped") if action == "scrap" else None)
        elif action == "step":
            stand.step()
        for command in commands:
            stand.worker.submit(command)
    stand.run()
    stand.assert_clean()
    assert all(stand.ended[100 + call] == "" for call in stand.done if 100 + call in stand.ended)
