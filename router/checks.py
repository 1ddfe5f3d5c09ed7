"""What every check of a request is made of: a field, a value, and what is allowed."""

from collections.abc import Sequence

from pdserve.errors import InvalidRequest


def within(field: str, value: int, lowest: int, highest: int) -> int:
    """The value, inside its range. Raises InvalidRequest."""
    require(lowest <= value <= highest, field, value, f"{lowest} to {highest}")
    return value


def require(allowed: bool, field: str, value: float, wanted: str) -> None:
    """Raises InvalidRequest, which shows the value, where it is not allowed."""
    if not allowed:  # comparisons with NaN are never true, so NaN ends here too
        shown = value if isinstance(value, int) else f"{value:.7g}"
        raise InvalidRequest(field, f"{shown} is not allowed; must be {wanted}")


def at_most(field: str, num_entries: int, most: int) -> None:
    """Raises InvalidRequest where a list is too long."""
    if num_entries > most:
        raise InvalidRequest(field, f"has {num_entries} entries; at most {most}")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Every id must be inside the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        problem = f"{token_ids[index]} is outside the vocabulary; must be 0 to {vocab_size - 1}"
        raise InvalidRequest(f"{field}[{index}]", problem)
