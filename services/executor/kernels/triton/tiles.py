"""Which queries one program of paged attention works on, and whose segments are shared out. Called by ``kernels``."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.executor.batch import StepBatch

SEGMENT = 256
"""Positions that are reduced together, counted from position 0: part of what fixes a result's bits."""
_MIN_PAIRS = 16
"""The fewest rows that a matrix unit takes."""

Ints = NDArray[np.int32]


class Tiles(NamedTuple):
    """The work of one attention call, on the device."""

    tiles: Tensor
    """[tiles, 3] int32: row, its first query here, first of its split tokens or -1."""
    split_tokens: Tensor
    """[split] int32: index among the step's tokens."""
    split_ends: Tensor
    """[split] int32: context length of each, its own position included."""
    max_segments: int
    """Of any split token; at least 1."""


class TilePlan(NamedTuple):
    """The same before it is copied to the device."""

    tiles: Ints
    split_tokens: Ints
    split_ends: Ints
    max_segments: int


def tile_pairs(group: int) -> int:
    """(query, head) pairs of a tile where ``group`` query heads share a KV head. Fixes bits, as ``SEGMENT`` does."""
    return max(_MIN_PAIRS, 1 << (group - 1).bit_length())


def plan(batch: StepBatch, group: int) -> TilePlan:
    """Tiles of every row of the step.

    A row of one tile and more than a segment of context is split; rows of many tiles keep a device busy as they are.
    """
    queries = tile_pairs(group) // group
    counts = np.diff(batch.query_starts)
    per_row = -(-counts // queries)
    rows = np.repeat(np.arange(len(counts)), per_row)
    first_queries = (np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * queries
    is_split = (per_row == 1) & (batch.context_lens > SEGMENT)
    split_counts = np.where(is_split, counts, 0)
    split_starts = np.where(is_split, np.cumsum(split_counts) - split_counts, -1)
    split_tokens = np.flatnonzero(np.repeat(is_split, counts))
    split_ends = batch.positions[split_tokens] + 1
    return TilePlan(
        np.stack([rows, first_queries, split_starts[rows]], axis=1).astype(np.int32),
        split_tokens.astype(np.int32),
        split_ends.astype(np.int32),
        max(1, -(-int(split_ends.max(initial=0)) // SEGMENT)),
    )
