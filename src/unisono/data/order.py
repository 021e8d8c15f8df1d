"""The order of samples in an epoch: a pure function, never a list.

`DistributedSampler` builds a list of all indices in every rank and every epoch. Here the index at a
position is computed when it is asked for, so an epoch of 10**9 samples starts as fast as one of 10**4,
and a resume in mid-epoch has nothing to fast-forward.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unisono.errors import InputError

MAX_SAMPLES = 1 << 62

# Up to this, one sort is as quick as the network, and fair where a network over few values is not.
_SORTED_UP_TO = 1024

# Even: rows and columns take turns. Six still show a trace of the grid at n = 1100, eight do not. They use up
# the 64 bytes of one BLAKE2b digest.
_NUM_ROUNDS = 8

# Trying this many grids finds one with almost no cell too many; see `_grid`.
_NUM_GRIDS = 32

# The multipliers of the SplitMix64 finaliser.
_FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)
_HALF_WORD = np.uint64(32)
_WEAK_BITS = np.uint64(24)


@dataclass(frozen=True, slots=True)
class Permutation:
    """One epoch's order: position -> sample index, a bijection of [0, num_samples).

    Made by `permutation`. Holds a few integers, whatever the number of samples.

    Attributes:
        num_samples: Samples of the epoch.
        rows: Rows of the grid that the network works on.
        columns: Columns of the grid; rows * columns >= num_samples.
        keys: One 64-bit key a round.
    """

    num_samples: int
    rows: int
    columns: int
    keys: tuple[int, ...]

    def __call__(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Returns the sample indices at `positions`.

        Each result depends on its own position only, so any grouping of positions gives the same indices.

        Args:
            positions: Integers in [0, num_samples).

        Shape:
            Any shape in, the same shape out.

        Raises:
            IndexError: A position lies outside [0, num_samples).
            TypeError: The positions are not integers.
        """
        given = np.asarray(positions)
        if given.size == 0:
            return np.empty(given.shape, np.int64)
        if given.dtype.kind not in "iu":
            raise TypeError(f"positions must be integers, got an array of {given.dtype}; convert them first")
        # One dimension, because NumPy warns of overflow on scalars and wraps silently on arrays.
        x = given.ravel().astype(np.uint64)
        if int(x.max()) >= self.num_samples:  # a negative position wraps to a huge one
            self._refuse(given)
        indices = self._sort(x) if self.num_samples <= _SORTED_UP_TO else self._walk(x)
        return indices.view(np.int64).reshape(given.shape)

    def _sort(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        # The mixer is a bijection of 64-bit words: no ties, so every sorting algorithm gives the same order.
        order = np.argsort(_mix(np.arange(self.num_samples, dtype=np.uint64), self.keys[0]))
        return order[x].astype(np.uint64)

    def _walk(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        # A cell beyond the last sample is sent through the network again. The cycle that it lies on began
        # inside, so it comes back inside, and two walks never meet: the map stays a bijection.
        x = self._encrypt(x)
        while (outside := np.flatnonzero(x >= self.num_samples)).size:
            x[outside] = self._encrypt(x[outside])
        return x

    def _encrypt(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        rows, columns = np.uint64(self.rows), np.uint64(self.columns)
        row = x // columns
        column = x - row * columns
        for row_key, column_key in zip(self.keys[::2], self.keys[1::2], strict=True):
            row = _shift(row, _mix(column, row_key), rows)
            column = _shift(column, _mix(row, column_key), columns)
        return row * columns + column

    def _refuse(self, positions: npt.NDArray[np.integer]) -> None:
        wrong = positions[(positions < 0) | (positions >= self.num_samples)].flat[0]
        raise IndexError(
            f"position {wrong} is outside an epoch of {self.num_samples} samples; "
            f"ask for positions from 0 up to, not including, {self.num_samples}"
        )


def permutation(seed: int, epoch: int, num_samples: int) -> Permutation:
    """Returns the order of one epoch, a pure function of its three arguments.

    Time and memory do not grow with `num_samples`.

    Args:
        seed: The recipe's seed, any integer.
        epoch: The epoch, any integer.
        num_samples: Samples in the data set, 0 to 2**62.

    Raises:
        InputError: `num_samples` is negative or above 2**62.

    Determinism:
        Integer arithmetic only: the same on every machine and for every NumPy version. The golden values
        in tests/unit/test_order.py hold it in place; a change of the order is a change of every run.

    Source:
        A Feistel network on a mixed-radix domain with cycle walking. J. Black and P. Rogaway, "Ciphers with
        Arbitrary Finite Domains", CT-RSA 2002 (the generalised Feistel and cycle-walking ciphers);
        M. Bellare, T. Ristenpart, P. Rogaway and T. Stegers, "Format-Preserving Encryption", SAC 2009.
        The rounds mix with the finaliser of G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom
        Number Generators", OOPSLA 2014: fair statistics, no secrecy.
    """
    if not 0 <= num_samples <= MAX_SAMPLES:
        raise InputError(f"an epoch of {num_samples} samples has no order; num_samples must be from 0 to 2**62")
    rows, columns = _grid(num_samples)
    return Permutation(num_samples, rows, columns, _round_keys(seed, epoch, num_samples))


def _grid(num_samples: int) -> tuple[int, int]:
    """Returns rows and columns of a nearly square grid with at least `num_samples` cells, and few more."""
    root = math.isqrt(max(num_samples, 1) - 1) + 1
    # -n % rows is what rows * ceil(n / rows) has too many; each of those cells may cost a walk.
    rows = min(range(root, root + _NUM_GRIDS), key=lambda rows: -num_samples % rows)
    return rows, -(-num_samples // rows)


def _round_keys(seed: int, epoch: int, num_samples: int) -> tuple[int, ...]:
    text = f"unisono.data.order:{seed:d}:{epoch:d}:{num_samples:d}"
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _NUM_ROUNDS).digest()
    return struct.unpack(f"<{_NUM_ROUNDS}Q", digest)


def _mix(x: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Returns a keyed bijection of 64-bit words; its high bits depend on all bits of `x`.

    SplitMix64's finaliser without its outer two xor-shifts: on `x` below 2**31 the first acts on the key
    alone, and the last only improves low bits, which are not used here.
    """
    word = x ^ np.uint64(key)
    word *= _FIRST_MULTIPLIER
    word ^= word >> _HALF_WORD
    word *= _SECOND_MULTIPLIER
    return word


def _shift(x: npt.NDArray[np.uint64], by: npt.NDArray[np.uint64], modulus: np.uint64) -> npt.NDArray[np.uint64]:
    """Returns (x + by) mod modulus, by the high 40 bits of `by`: a sum that overflowed would be no bijection."""
    by >>= _WEAK_BITS
    by += x
    by %= modulus
    return by
