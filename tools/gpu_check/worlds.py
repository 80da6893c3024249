"""Random steps over random KV memory, in the shapes of real models."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.interface import LayerCache

BLOCK_SIZE = 16


class Shape(NamedTuple):
    """One model's layer."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    def products(self) -> dict[str, tuple[int, int]]:
        """Columns out and in of each product."""
        queries, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (queries + 2 * kv, self.hidden),
            "out": (self.hidden, queries),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab_size, self.hidden),
        }


SHAPES = (
    Shape("SmolLM2-135M", 576, 1536, 9, 3, 64, 49152),
    Shape("Llama-3.1-8B", 4096, 14336, 32, 8, 128, 128256),
)


class Row(NamedTuple):
    """The last ``num_tokens`` of a context, which lies in ``blocks``."""

    context: int
    num_tokens: int
    blocks: Sequence[int]


def lay_out(rows: Sequence[Row]) -> StepBatch:
    """A step of these rows; nothing is sampled."""
    counts = np.array([row.num_tokens for row in rows])
    ends = np.array([row.context for row in rows])
    starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(starts[-1]) + np.repeat(ends - counts - starts[:-1], counts)
    tables = np.full((len(rows), -(-int(ends.max()) // BLOCK_SIZE)), -1, np.int32)
    for table, row in zip(tables, rows, strict=True):
        used = -(-row.context // BLOCK_SIZE)
        table[:used] = row.blocks[:used]
    row_of = np.repeat(np.arange(len(rows)), counts)
    slots = tables[row_of, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepBatch(
        step=0,
        lanes=list(range(len(rows))),
        token_ids=positions.astype(np.int32) % 1000,
        positions=positions.astype(np.int32),
        slot_mapping=slots,
        query_starts=starts.astype(np.int32),
        context_lens=ends.astype(np.int32),
        block_tables=tables,
        samples=[],
    )


class World:
    """Contexts in blocks dealt at random, and a cache that is full of random numbers in them and of NaN elsewhere."""

    def __init__(
        self, contexts: Sequence[int], shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)
        needed = [-(-context // BLOCK_SIZE) for context in contexts]
        self.num_blocks = sum(needed) + 8
        order = np.random.default_rng(seed).permutation(self.num_blocks)
        self.blocks = [part.tolist() for part in np.split(order[: sum(needed)], np.cumsum(needed)[:-1])]
        self.contexts = list(contexts)

    def random(self, *size: int, scale: float = 1.0) -> Tensor:
        """Normally distributed numbers, a million rows or not: drawn on the device."""
        return torch.randn(size, generator=self.generator, device=self.device).mul_(scale).to(self.dtype)

    def row(self, index: int, count: int, context: int | None = None) -> Row:
        """The last ``count`` tokens of the whole context of a row, or of its first ``context`` tokens."""
        return Row(self.contexts[index] if context is None else context, count, self.blocks[index])

    def cache(self, new_cache: Callable[..., LayerCache]) -> LayerCache:
        """Keys and values, [blocks, kv heads, block size, head size] as Triton's kernels lay them out."""
        shape = self.shape
        cache = new_cache(self.num_blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim, self.dtype)
        used = torch.tensor([block for blocks in self.blocks for block in blocks], device=self.device)
        for part in cache:
            part.fill_(float("nan"))
            part[used] = self.random(len(used), *part.shape[1:])
        for context, blocks in zip(self.contexts, self.blocks, strict=True):
            for part in cache:
                part[blocks[-1], :, (context - 1) % BLOCK_SIZE + 1 :] = float("nan")
        return cache
