"""The directory of a GGUF file: its metadata and where its tensors lie.

The file is mapped once; `GgufFile` reads everything before the tensor data into Python values and leaves the data where
it is. `gguf.GGUFReader` does the same through one numpy view per element, which takes seconds for a vocabulary of
49,152 strings, and trusts the lengths it finds; here every length is held against the end of the file before it is
used.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from pdserve.errors import ConfigError

Scalar = bool | int | float | str
Value = Scalar | list[Scalar]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 1 << 40  # of a tensor; far above any model, far below where int64 arithmetic would overflow
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as it lies in the file."""

    name: str
    shape: tuple[int, ...]  # rows first, as numpy and torch have it
    quantization: GGMLQuantizationType
    data: NDArray[np.uint8]  # [rows, row_bytes] for two dimensions, [row_bytes] for one


class GgufFile:
    """Metadata and tensors of one file; ConfigError with the file's name for everything that is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map_file(path)
        cursor = _Cursor(self._bytes, self.fail)
        num_tensors, num_keys = self._read_header(cursor)
        self.metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value()
        self.tensors = self._read_tensors(cursor, num_tensors)

    def fail(self, problem: str) -> NoReturn:
        """Raise the one-line error that names this file."""
        raise ConfigError(f"{self.path}: {problem}")

    def integer(self, key: str) -> int:
        """A required whole number."""
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"metadata key {key} should be a whole number, not {_short(value)}")
        return value

    def number(self, key: str) -> float:
        """A required number."""
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(f"metadata key {key} should be a finite number, not {_short(value)}")
        return float(value)

    def text(self, key: str) -> str:
        """A required string."""
        value = self._required(key)
        if not isinstance(value, str):
            self.fail(f"metadata key {key} should be a string, not {_short(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """A required list of strings."""
        value = self._required(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(f"metadata key {key} should be a list of strings, not {_short(value)}")
        return [item for item in value if isinstance(item, str)]

    def integers(self, key: str) -> list[int]:
        """A required list of whole numbers."""
        value = self._required(key)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            self.fail(f"metadata key {key} should be a list of whole numbers, not {_short(value)}")
        return [item for item in value if isinstance(item, int)]

    def numbers(self, key: str) -> list[float]:
        """A required list of numbers."""
        value = self._required(key)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            self.fail(f"metadata key {key} should be a list of numbers, not {_short(value)}")
        return [float(item) for item in value]

    def _required(self, key: str) -> Value:
        if key not in self.metadata:
            self.fail(f"metadata key {key} is missing")
        return self.metadata[key]

    def _read_header(self, cursor: "_Cursor") -> tuple[int, int]:
        magic = self._bytes[:4]
        if magic != b"GGUF":
            self.fail(f"not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
        cursor.skip(4)
        version = cursor.integer("I")
        if version not in _VERSIONS:
            self.fail(f"GGUF version {version} is not supported (2 and 3, little-endian, are)")
        return cursor.integer("Q"), cursor.integer("Q")

    def _read_tensors(self, cursor: "_Cursor", num_tensors: int) -> dict[str, GgufTensor]:
        directory = [self._read_entry(cursor) for _ in range(num_tensors)]
        alignment = self.integer("general.alignment") if "general.alignment" in self.metadata else _DEFAULT_ALIGNMENT
        if alignment < 1 or alignment & (alignment - 1):
            self.fail(f"general.alignment is {alignment}, which is no power of two")
        start = -(-cursor.offset // alignment) * alignment
        tensors = {entry[0]: self._place(entry, start) for entry in directory}
        if len(tensors) != len(directory):
            self.fail("two tensors have the same name")
        return tensors

    def _read_entry(self, cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        num_dimensions = cursor.integer("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self.fail(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed([cursor.integer("Q") for _ in range(num_dimensions)]))
        return name, shape, cursor.integer("I"), cursor.integer("Q")

    def _place(self, entry: tuple[str, tuple[int, ...], int, int], start: int) -> GgufTensor:
        name, shape, type_number, offset = entry
        quantization = self._quantization(name, type_number)
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        if math.prod(shape) not in range(1, _MAX_ELEMENTS) or shape[-1] % block_elements:
            self.fail(f"tensor {name!r} of {quantization.name} has the impossible shape {list(shape)}")
        byte_shape = (*shape[:-1], shape[-1] // block_elements * block_bytes)
        num_bytes, begin = math.prod(byte_shape), start + offset
        if begin + num_bytes > len(self._bytes):
            self.fail(f"truncated: tensor {name!r} ends at byte {begin + num_bytes}, the file at {len(self._bytes)}")
        data = np.frombuffer(self._bytes, np.uint8, num_bytes, begin).reshape(byte_shape)
        return GgufTensor(name, shape, quantization, data)

    def _quantization(self, name: str, type_number: int) -> GGMLQuantizationType:
        try:
            return GGMLQuantizationType(type_number)
        except ValueError:
            self.fail(f"tensor {name!r} has the unknown quantization type {type_number}")


class _Cursor:
    """Reads one value after another, never beyond the end."""

    def __init__(self, data: mmap.mmap, fail: Callable[[str], NoReturn]) -> None:
        self.offset = 0
        self._data = data
        self._fail = fail

    def integer(self, code: str) -> int:
        """One whole number in the format that `struct` calls `code`."""
        return int(self._unpack(code, 1)[0])

    def string(self) -> str:
        """A length and that many bytes of UTF-8."""
        num_bytes = self.integer("Q")
        begin = self.skip(num_bytes)
        try:
            return self._data[begin : begin + num_bytes].decode()
        except UnicodeDecodeError:
            self._fail(f"corrupt: the string at byte {begin} is not UTF-8")

    def value(self) -> Value:
        """A metadata value: its type, then itself."""
        kind = self.integer("I")
        if kind != _ARRAY:
            return self._items(kind, 1)[0]
        item_kind, count = self.integer("I"), self.integer("Q")
        return self._items(item_kind, count)

    def skip(self, num_bytes: int) -> int:
        """Step over `num_bytes` and return where they begin."""
        begin = self.offset
        if num_bytes > len(self._data) - begin:
            self._fail(f"truncated or corrupt: {num_bytes} bytes wanted at byte {begin} of {len(self._data)}")
        self.offset = begin + num_bytes
        return begin

    def _items(self, kind: int, count: int) -> list[Scalar]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            self._fail(f"corrupt: unknown metadata type {kind} before byte {self.offset}")
        return list(self._unpack(_SCALARS[kind], count))

    def _unpack(self, code: str, count: int) -> tuple[Scalar, ...]:
        begin = self.skip(count * struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self._data, begin)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a GGUF file: it is empty") from error


def _short(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
