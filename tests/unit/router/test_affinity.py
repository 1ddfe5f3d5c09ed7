"""Which worker has probably kept a prefix."""

from pdserve.request import Incarnation
from router.affinity import Affinity, Prefix

ONE, OTHER = Incarnation("one"), Incarnation("other")


def prefix(length: int, *, salt: int = 0) -> Prefix:
    return Prefix([salt, *range(1, length)], 16)


def test_a_longer_prompt_begins_with_what_was_seen_and_only_there() -> None:
    affinity = Affinity()
    affinity.note(prefix(40), ONE)
    assert affinity.known_tokens(prefix(100), ONE) == 32
    assert affinity.known_tokens(prefix(20), ONE) == 16
    assert affinity.known_tokens(prefix(100), OTHER) == 0
    assert affinity.known_tokens(prefix(100, salt=9), ONE) == 0


def test_what_was_not_used_for_long_is_forgotten_first() -> None:
    affinity = Affinity(max_pages=4)
    affinity.note(prefix(33, salt=1), ONE)
    affinity.note(prefix(33, salt=2), ONE)
    affinity.note(prefix(33, salt=1), ONE)  # used again
    affinity.note(prefix(33, salt=3), ONE)
    known = [affinity.known_tokens(prefix(33, salt=salt), ONE) for salt in (1, 2, 3)]
    assert known == [32, 0, 32]
