"""One JSON object of a config.json, read key by key.

It remembers which keys somebody understood, so that what is left over can be refused by name: a model that is computed
almost right answers worse than one that does not start.
"""

import json
from collections.abc import Mapping
from typing import Any

from pdserve.errors import ConfigError


class Keys:
    """The keys of one object; every wrong value is a ConfigError of one line that names file and key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where it is absent or null."""
        self.read.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.get(key, default)
        if type(value) is not int or value < least:
            raise self.wrong(key, value, f"a whole number of at least {least}")
        return value

    def whole_or_none(self, key: str, absent: int | None = None) -> int | None:
        """A whole number of at least 1, or null for None, which is not what an absent key means."""
        if key not in self.raw:
            return absent
        return None if self.get(key) is None else self.whole(key)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def positive_or_none(self, key: str) -> float | None:
        """A finite number above 0, or None where it is absent or null."""
        return None if self.get(key) is None else self.positive(key)

    def positives(self, key: str, count: int) -> tuple[float, ...]:
        """A list of so many finite numbers above 0."""
        values = self.get(key)
        if (
            not isinstance(values, list)
            or len(values) != count
            or not all(type(value) in (int, float) and 0 < value < float("inf") for value in values)
        ):
            raise self.wrong(key, values, f"a list of {count} numbers above 0")
        return tuple(float(value) for value in values)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value, "true or false")
        return value

    def section(self, key: str) -> "Keys":
        """An object inside this one; empty where it is absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return Keys(value, f"{self.where}: {key}")

    def require(self, key: str, only: Any) -> None:
        """Where the key is present, it has the one value that is implemented."""
        if self.get(key, only) != only:
            raise self.wrong(key, self.raw[key], f"{json.dumps(only)}, nothing else is implemented")

    def pass_over(self, *keys: str) -> None:
        """These mean nothing for inference."""
        self.read.update(keys)

    def refuse_others(self, irrelevant: frozenset[str] = frozenset()) -> None:
        """Name the keys that nobody understood; null says nothing and passes."""
        others = sorted(key for key in self.raw.keys() - self.read - irrelevant if self.raw[key] is not None)
        if others:
            raise ConfigError(f"{self.where}: unknown {', '.join(others)}: refused, as it may change what is computed")

    def wrong(self, key: str, value: Any, allowed: str) -> ConfigError:
        """The one line that says what the key must be."""
        got = "it is missing" if value is None else f"it is {json.dumps(value)[:80]}"
        return ConfigError(f"{self.where}: {key} must be {allowed}; {got}")
