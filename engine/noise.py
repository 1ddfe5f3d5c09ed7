"""The noise of sampling: a hash of (seed, position, token id), the same on every machine.

    seed, position -> key of a row -> with a token id: 52 bits k -> u = (k + 1/2) / 2^52 -> Gumbel noise -log(-log(u))

u is exact in float64, and never 0 or 1.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Ids = NDArray[np.intp]

UNIFORM_BITS = 52
MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def row_key(seed: int, position: int) -> int:
    """What a row's noise starts from; unrelated for neighbouring seeds and positions."""
    return mix((mix(seed & MASK64) + position * GOLDEN) & MASK64)


def mix(word: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014) on one 64-bit word."""
    word = ((word ^ (word >> 30)) * MIX_1) & MASK64
    word = ((word ^ (word >> 27)) * MIX_2) & MASK64
    return word ^ (word >> 31)


# Where the hash of an id starts, for all vocabularies up to this size; others compute it.
_STARTS: Final = np.arange(1, 2**18 + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def lucky_ids(count: int, key: int, needed: int) -> Ids:
    """The ids below `count` whose `hash52` is at least `needed`, ascending; nothing is computed that does not decide.

    The last step of the hash leaves its upper 31 bits as they are: few pass by these, and they are hashed in full.
    """
    starts = _STARTS[:count] if count <= len(_STARTS) else np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    words = starts + np.uint64(key)
    words ^= words >> np.uint64(30)
    words *= np.uint64(MIX_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(MIX_2)
    few = np.flatnonzero(words >= np.uint64(needed >> 21 << 33))
    return few[hash52(few.astype(np.uint64), key) >= np.uint64(needed)]


def hash52(ids: Words, key: int) -> Words:
    """52 hashed bits for each id: output number id + 1 of the SplitMix64 that starts at `key`. uint64 wraps around."""
    words = ids + np.uint64(1)
    words *= np.uint64(GOLDEN)
    words += np.uint64(key)
    words ^= words >> np.uint64(30)
    words *= np.uint64(MIX_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(MIX_2)
    words ^= words >> np.uint64(31)
    words >>= np.uint64(64 - UNIFORM_BITS)
    return words
