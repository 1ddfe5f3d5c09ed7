"""Frozen dataclasses to plain values (what JSON and YAML hold) and back, strictly.

A record's life: dataclass -> `to_plain` -> JSON text -> another process -> `from_plain` -> an equal dataclass.
Unknown and missing keys and values of the wrong type are refused with a message that names them.
"""

from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, NewType, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(record: Any) -> dict[str, Any]:
    """The fields of a dataclass, nested ones as dicts, ready for json.dumps."""
    return asdict(record)


def from_plain(cls: type[T], plain: object, where: str = "") -> T:
    """Build a `cls` from plain values. `where` is the path so far, for messages. Raises ValueError."""
    if not isinstance(plain, dict):
        raise ValueError(f"{where or cls.__name__}: expected a mapping, got {plain!r}")
    known: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    _refuse_unknown(plain, [field.name for field in known], where)
    hints = get_type_hints(cls)
    values = {}
    for field in known:
        path = f"{where}.{field.name}" if where else field.name
        if field.name in plain:
            values[field.name] = _value(hints[field.name], plain[field.name], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path}: missing")
    return cls(**values)


def _refuse_unknown(plain: dict[Any, Any], known: list[str], where: str) -> None:
    unknown = [str(key) for key in plain if key not in known]
    if unknown:
        prefix = f"{where}: " if where else ""
        raise ValueError(f"{prefix}unknown key {unknown[0]!r}; allowed: {', '.join(known)}")


def _value(hint: Any, value: object, path: str) -> Any:
    if isinstance(hint, NewType):
        hint = hint.__supertype__
    if is_dataclass(hint):
        return from_plain(hint, value, path)  # type: ignore[arg-type]
    if get_origin(hint) is Literal:
        return _choice(get_args(hint), value, path)
    if get_origin(hint) is tuple:
        return _items(get_args(hint)[0], value, path)
    return _scalar(hint, value, path)


def _choice(allowed: tuple[Any, ...], value: object, path: str) -> Any:
    if value not in allowed:
        raise ValueError(f"{path}: {value!r} is not one of {', '.join(map(str, allowed))}")
    return value


def _items(hint: Any, value: object, path: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{path}: expected a list, got {value!r}")
    return tuple(_value(hint, item, f"{path}[{number}]") for number, item in enumerate(value))


def _scalar(hint: Any, value: object, path: str) -> Any:
    # bool is an int in Python; "threads: true" is a mistake all the same
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        expected = "nothing" if hint is NoneType else hint.__name__
        raise ValueError(f"{path}: expected {expected}, got {value!r}")
    return value
