"""Rows alone against the same rows in crowds. Used by ``invariance`` and its parts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Finding:
    """What one check compared."""

    what: str
    rows: int
    differing: int


def cuts(total: int, draw: np.random.Generator, most: int = 300) -> Iterator[tuple[int, int]]:
    """Ranges that tile 0..total, of sizes as steps have them: many small, some large."""
    start = 0
    while start < total:
        size = int(draw.integers(1, 9)) if draw.random() < 0.5 else int(draw.integers(1, most))
        yield start, min(start + size, total)
        start += size


def rowwise(
    what: str, function: Callable[[Tensor], Tensor], x: Tensor, draw: np.random.Generator, turns: int = 3
) -> Finding:
    """Rows of ``x`` alone against the same rows in other orders and crowds."""
    alone = torch.cat([function(x[row : row + 1].contiguous()) for row in range(len(x))])
    differing = 0
    for _ in range(turns):
        order = torch.from_numpy(draw.permutation(len(x)))
        shuffled = x[order]
        for start, end in cuts(len(x), draw):
            found = function(shuffled[start:end].contiguous())
            differing += int((found != alone[order[start:end]]).flatten(1).any(1).sum())
    return Finding(what, len(x), differing)
