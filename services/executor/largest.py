"""The largest of a long row of numbers without sorting it. Used by ``sampling`` and ``logprobs``; pure numpy.

The row is cut into groups; of their maxima the ``count``-th largest is a bound that at least ``count`` numbers reach,
and few more do. Three cheap passes instead of one partition, which takes several times as long on a vocabulary.
"""

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

GROUPS_PER_WANTED = 4
"""More groups bound more tightly; fewer have fewer maxima to look through."""


def reach(row: Row, count: int) -> Ids:
    """Places, in order, of at least ``count`` numbers: all that are as large as the ``count``-th largest, and more."""
    size = len(row) // (GROUPS_PER_WANTED * count)
    if size < 2:
        return np.arange(len(row))
    head = len(row) - len(row) % size
    maxima = np.concatenate([row[:head].reshape(size, -1).max(axis=0), row[head:]])
    return np.flatnonzero(row >= np.partition(maxima, len(maxima) - count)[len(maxima) - count])


def largest(row: Row, count: int) -> Row:
    """The ``count`` largest numbers, in descending order."""
    candidates = row[reach(row, count)]
    candidates.sort()
    return candidates[::-1][:count]


def places_of_largest(row: Row, count: int) -> Ids:
    """Places of the ``count`` largest numbers, in descending order; of equal ones the first comes first."""
    count = min(count, len(row))
    if not count:
        return np.empty(0, np.int64)
    candidates = reach(row, count)
    order = np.argsort(-row[candidates], kind="stable")[:count]
    return candidates[order]
