"""Random JSON schemas whose texts are short: recursion, enums, unicode, nested arrays, alternatives."""

import random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("a", "é", "日本", "👩", 'quo"te', "back\\slash", "line\nfeed", "", "tab\t", "true", "0")
_NAMES = ("id", "größe", "名前", 'a"b', "c\\d", "👍", "list")


def random_schema(seed: int) -> Schema:
    """The same one for the same seed."""
    rng = random.Random(seed)
    if seed % 5 == 0:
        return _tree(rng)
    if seed % 5 == 1:
        return _chain(rng)
    return _object(rng, 3) if seed % 5 == 2 else _any(rng, 3)


def _any(rng: random.Random, depth: int) -> Schema:
    leaves = (_string, _enum, _integer, _number, _plain)
    nested = (_array, _object, _alternatives)
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(leaves)(rng)
    return rng.choice(nested)(rng, depth - 1)


def _string(rng: random.Random) -> Schema:
    kinds: list[Schema] = [
        {"maxLength": rng.randint(0, 6)},
        {"minLength": 1, "maxLength": 3},
        {"pattern": "^[a-zé]{0,4}$"},
    ]
    return {"type": "string", **rng.choice(kinds)}


def _enum(rng: random.Random) -> Schema:
    values: list[Any] = [*rng.sample(_WORDS, 3), rng.randint(-5, 999), None, [1, "é"], {"k": False}]
    return {"const": rng.choice(values)} if rng.random() < 0.3 else {"enum": rng.sample(values, 3)}


def _integer(rng: random.Random) -> Schema:
    lowest = rng.randint(-200, 50)
    return {"type": "integer", "minimum": lowest, "maximum": lowest + rng.randint(0, 300)}


def _number(rng: random.Random) -> Schema:
    return {"type": "number", "minimum": -rng.randint(0, 9), "exclusiveMaximum": rng.randint(1, 50)}


def _plain(rng: random.Random) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _array(rng: random.Random, depth: int) -> Schema:
    fewest = rng.randint(0, 1)
    bounds = {"minItems": fewest, "maxItems": fewest + rng.randint(0, 2)}
    if rng.random() < 0.3:
        return {"type": "array", "prefixItems": [_any(rng, depth), _any(rng, depth)], "items": False, "minItems": 2}
    return {"type": "array", "items": _any(rng, depth), **bounds}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 3))
    properties = {name: _any(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _alternatives(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth), _any(rng, depth)]}


def _tree(rng: random.Random) -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    properties = {"name": _any(rng, 0), "größe": _any(rng, 0), "children": children}
    node = {"type": "object", "properties": properties, "required": ["name", "children"], "additionalProperties": False}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _chain(rng: random.Random) -> Schema:
    after = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]}
    properties = {"value": _any(rng, 1), "next": after}
    link = {"type": "object", "properties": properties, "required": ["value", "next"], "additionalProperties": False}
    return {"$defs": {"link": link}, "type": "array", "items": {"$ref": "#/$defs/link"}, "minItems": 1, "maxItems": 2}
