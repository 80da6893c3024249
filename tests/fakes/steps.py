"""Steps built row by row, without a scheduler or lanes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from services.executor.batch import SampleRow, StepBatch
from shared.wire.sampling import Sampling


class Row(NamedTuple):
    """Compute ``num_tokens`` of ``tokens`` from ``start`` on; sample what follows unless ``sampling`` is None."""

    tokens: Sequence[int]
    start: int
    num_tokens: int
    blocks: Sequence[int]
    sampling: Sampling | None = Sampling()
    num_prompt: int = 1


def step(rows: Sequence[Row], block_size: int) -> StepBatch:
    """Lay rows out flat, as ``lanes`` does; row i is in lane i."""
    positions = [np.arange(row.start, row.start + row.num_tokens) for row in rows]
    slots = [
        np.array(row.blocks)[p // block_size] * block_size + p % block_size
        for row, p in zip(rows, positions, strict=True)
    ]
    ends = [row.start + row.num_tokens for row in rows]
    width = max(-(-end // block_size) for end in ends)
    tables = np.full((len(rows), width), -1, np.int32)
    for table, row, end in zip(tables, rows, ends, strict=True):
        used = -(-end // block_size)
        table[:used] = row.blocks[:used]
    return StepBatch(
        step=0,
        lanes=list(range(len(rows))),
        token_ids=np.concatenate([row.tokens[row.start : end] for row, end in zip(rows, ends, strict=True)]).astype(
            np.int32
        ),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots).astype(np.int64),
        query_starts=np.cumsum([0, *(row.num_tokens for row in rows)]).astype(np.int32),
        context_lens=np.array(ends, np.int32),
        block_tables=tables,
        samples=[
            SampleRow(i, i, 0, row.sampling, end, np.array(row.tokens[:end], np.int32), row.num_prompt)
            for i, (row, end) in enumerate(zip(rows, ends, strict=True))
            if row.sampling is not None
        ],
    )
