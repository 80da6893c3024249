"""Triton's paged attention: equal to plain torch (K1), touches what it may (K2, K3), blind to neighbours (K4)."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.interface import LayerCache, QkNorm, Rotary
from services.executor.kernels.reference import ReferenceKernels
from services.executor.kernels.triton import tiles
from services.executor.kernels.triton.kernels import StepColumns, TritonAttention, TritonKernels
from services.executor.kernels.triton.tiles import SEGMENT, Tiles
from tests.fakes.steps import Row, step
from tests.fakes.triton_device import DEVICE, DTYPES, TOLERANCE

KERNELS = TritonKernels(DEVICE)
PLAIN = ReferenceKernels(DEVICE)
SCALE = 0.3


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    window: int = 0
    dtype: torch.dtype = torch.float32


@dataclass
class World:
    """Sequences with given contexts, of which the last ``count`` tokens are this step's; unused slots hold NaN."""

    shape: Shape
    rows: list[tuple[int, int]]
    """(context length, tokens of this step) a row."""
    seed: int = 0
    normed: bool = False
    is_turned: bool = True
    turns: Rotary | None = field(init=False)
    norm: QkNorm | None = field(init=False)

    def __post_init__(self) -> None:
        shape, self.generator = self.shape, torch.Generator().manual_seed(self.seed)
        self.past = [self.random(2, context, shape.kv_heads, shape.head_dim) for context, _ in self.rows]
        heads = shape.heads + 2 * shape.kv_heads
        self.qkv = [self.random(context, heads, shape.head_dim) for context, _ in self.rows]
        angles = torch.outer(torch.arange(3000.0), torch.rand(shape.head_dim // 2, generator=self.generator))
        self.turns = Rotary(angles.cos().to(DEVICE), angles.sin().to(DEVICE)) if self.is_turned else None
        self.norm = QkNorm(self.random(shape.head_dim), self.random(shape.head_dim), 1e-6) if self.normed else None

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(DEVICE, self.shape.dtype)

    def blocks(self, seed: int) -> tuple[list[list[int]], int]:
        """Each row's blocks, in random order among some that nobody uses."""
        needed = [-(-context // self.shape.block_size) for context, _ in self.rows]
        order = np.random.default_rng(seed).permutation(sum(needed) + 4).tolist()
        return [[order.pop() for _ in range(count)] for count in needed], sum(needed) + 4

    def batch(self, picked: list[int], blocks: list[list[int]]) -> StepBatch:
        rows = [self.rows[i] for i in picked]
        return step(
            [Row([0] * c, c - n, n, blocks[i]) for (c, n), i in zip(rows, picked, strict=True)], self.shape.block_size
        )

    def cache(self, kernels: TritonKernels | ReferenceKernels, blocks: list[list[int]], num_blocks: int) -> LayerCache:
        """What was computed before this step, in its slots; NaN everywhere else."""
        shape = self.shape
        cache = kernels.new_cache(num_blocks, shape.block_size, shape.kv_heads, shape.head_dim, shape.dtype)
        for part, which in zip(cache, (0, 1), strict=True):
            part.fill_(float("nan"))
            by_slot = part.transpose(1, 2) if kernels is not PLAIN else part
            for (context, count), table, past in zip(self.rows, blocks, self.past, strict=True):
                slots = torch.arange(context - count, device=DEVICE)
                block = torch.tensor(table, device=DEVICE)[slots // shape.block_size]
                by_slot[block, slots % shape.block_size] = past[which][: context - count]
        return cache

    def run(
        self, kernels: TritonKernels | ReferenceKernels = KERNELS, table_seed: int = 0, picked: list[int] | None = None
    ) -> tuple[Tensor, LayerCache, LayerCache, StepBatch]:
        """Outputs, the cache before and after, and the step; with ``picked``, of those rows alone."""
        shape = self.shape
        picked = list(range(len(self.rows))) if picked is None else picked
        blocks, num_blocks = self.blocks(table_seed)
        batch, cache = self.batch(picked, blocks), self.cache(kernels, blocks, num_blocks)
        before = LayerCache(cache.keys.clone(), cache.values.clone())
        qkv = torch.cat([self.qkv[i][self.rows[i][0] - self.rows[i][1] :] for i in picked])
        attention = kernels.step(batch, shape.block_size)
        queries = attention.rotate_and_write(qkv, shape.heads, self.turns, self.norm, cache)
        return attention.attend(queries, cache, SCALE, shape.window), before, cache, batch


shapes = st.builds(
    lambda kv_heads, group, dim, block_size, window, dtype: Shape(
        kv_heads * group, kv_heads, dim, block_size, window, dtype
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3, 4, 17]),
    st.sampled_from([4, 16, 20]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([0, 0, 1, 5, 300]),
    st.sampled_from(DTYPES),
)
contexts = st.one_of(st.integers(1, 40), st.sampled_from([SEGMENT, SEGMENT + 1, 2 * SEGMENT + 37])).flatmap(
    lambda n: st.tuples(st.just(n), st.just(1) | st.integers(1, min(n, 9)))
)
worlds = st.builds(
    World,
    shapes,
    st.lists(contexts, min_size=1, max_size=4),
    st.integers(0, 2**31),
    normed=st.booleans(),
    is_turned=st.booleans(),
)


def heads_equal(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=10, deadline=None)
@given(worlds)
def test_k1_equals_the_reference(world: World) -> None:
    found, expected = world.run(), world.run(PLAIN)
    assert torch.isfinite(found[0]).all(), "something outside a row's context was read"
    heads_equal(found[0], expected[0])
    for part, plain in zip(found[2], expected[2], strict=True):
        heads_equal(part.transpose(1, 2).nan_to_num(77), plain.nan_to_num(77))


@settings(max_examples=5, deadline=None)
@given(worlds)
def test_k2_slots_that_are_not_named_are_unchanged(world: World) -> None:
    _, before, after, batch = world.run()
    for old, new in zip(before, after, strict=True):
        old, new = (part.transpose(1, 2).flatten(0, 1) for part in (old, new))
        named = torch.zeros(len(old), dtype=torch.bool, device=DEVICE)
        named[torch.as_tensor(batch.slot_mapping, device=DEVICE)] = True
        assert torch.equal(new[~named].nan_to_num(77), old[~named].nan_to_num(77))
        assert torch.isfinite(new[named]).all()


@settings(max_examples=4, deadline=None)
@given(worlds)
def test_k3_renaming_blocks_changes_nothing(world: World) -> None:
    assert torch.equal(world.run(table_seed=0)[0], world.run(table_seed=1)[0])


@settings(max_examples=5, deadline=None)
@given(worlds, st.data())
def test_k4_a_row_is_the_same_alone_and_in_a_crowd(world: World, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(world.rows) - 1))
    starts = np.cumsum([0, *(count for _, count in world.rows)])
    together = world.run()[0][starts[row] : starts[row + 1]]
    assert torch.equal(world.run(picked=[row])[0], together)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 270])
def test_k4_cuts_change_no_bit(dtype: torch.dtype, window: int) -> None:
    """A token computed in a long chunk (one program for all segments) and as a decode (one for each) is the same."""
    end, length = 2 * SEGMENT + 9, 20
    world = World(Shape(window=window, dtype=dtype), [(end, length)])
    whole, _, cache, batch = world.run()
    blocks = batch.block_tables[0].tolist()
    queries = world.qkv[0][-length:]
    for start, stop in ((0, 7), (7, 8), (8, 19), (19, 20)):
        attention = KERNELS.step(
            step(
                [Row([0] * (end - length + stop), end - length + start, stop - start, blocks)], world.shape.block_size
            ),
            world.shape.block_size,
        )
        turned = attention.rotate_and_write(
            queries[start:stop].contiguous(), world.shape.heads, world.turns, None, cache
        )
        assert torch.equal(attention.attend(turned, cache, SCALE, window), whole[start:stop]), (start, stop)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_programs_changes_no_bit(dtype: torch.dtype) -> None:
    world = World(Shape(dtype=dtype), [(3 * SEGMENT + 5, 1), (SEGMENT + 1, 2)])
    found, _, cache, batch = world.run()
    queries = torch.cat([world.qkv[0][-1:], world.qkv[1][-2:]])
    for num_processors in (2, 1000):
        kernels = TritonKernels(DEVICE)
        kernels.num_processors = num_processors
        attention = kernels.step(batch, world.shape.block_size)
        turned = attention.rotate_and_write(queries, world.shape.heads, world.turns, None, cache)
        assert torch.equal(attention.attend(turned, cache, SCALE, 0), found)


def test_padding_rows_write_nowhere_and_get_zeros() -> None:
    """As in a captured step: the rows that are not there have no slot and no context."""
    world = World(Shape(), [(SEGMENT + 9, 1), (7, 1)])
    found, before, _, batch = world.run()
    blocks, num_blocks = world.blocks(0)
    cache = world.cache(KERNELS, blocks, num_blocks)
    columns = StepColumns(
        positions=torch.tensor([*batch.positions, 0, 0], device=DEVICE, dtype=torch.int32),
        slots=torch.tensor([*batch.slot_mapping, -1, -1], device=DEVICE),
        query_starts=torch.arange(5, device=DEVICE, dtype=torch.int32),
        context_lens=torch.tensor([*batch.context_lens, 0, 0], device=DEVICE, dtype=torch.int32),
        tables=torch.nn.functional.pad(torch.as_tensor(batch.block_tables, device=DEVICE), (0, 3, 0, 2), value=-1),
    )
    each = torch.arange(4, device=DEVICE, dtype=torch.int32)
    shared = Tiles(torch.stack([each, each * 0, each], 1), each, columns.context_lens, max_segments=5)
    attention = TritonAttention(columns, lambda group: shared, num_processors=3)
    qkv = torch.cat([world.qkv[0][-1:], world.qkv[1][-1:], world.random(2, 10, 16)])
    turned = attention.rotate_and_write(qkv, world.shape.heads, world.turns, None, cache)
    padded = attention.attend(turned, cache, SCALE, 0)
    assert torch.equal(padded[:2], found)
    assert (padded[2:] == 0).all()
    for old, new in zip(before, cache, strict=True):
        changed = (old.nan_to_num(77) != new.nan_to_num(77)).any(-1).any(1).flatten().nonzero().flatten().tolist()
        assert changed == sorted(batch.slot_mapping.tolist())


def test_nan_in_one_row_stays_there() -> None:
    world = World(Shape(), [(SEGMENT + 9, 1), (7, 2), (30, 1)])
    found = world.run()[0]
    world.past[0][:, 3] = float("nan")
    broken = world.run()[0]
    assert broken[0].isnan().all()
    assert torch.equal(broken[1:], found[1:])


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 70)), min_size=1, max_size=9), st.integers(1, 20))
def test_tiles_cover_every_query_once(rows: list[tuple[int, int]], group: int) -> None:
    batch = step([Row([0] * (past + n), past, n, list(range(past + n))) for past, n in rows], 1)
    plan = tiles.plan(batch, group)
    queries = tiles.tile_pairs(group) // group
    assert queries >= 1
    seen = [
        (row, first + i) for row, first, _ in plan.tiles.tolist() for i in range(queries) if first + i < rows[row][1]
    ]
    assert seen == [(row, i) for row, (_, n) in enumerate(rows) for i in range(n)]
    split = [
        (batch.query_starts[row] + i, scratch + i)
        for row, _, scratch in plan.tiles.tolist()
        if scratch >= 0
        for i in range(rows[row][1])
    ]
    assert split == list(zip(plan.split_tokens.tolist(), range(len(split)), strict=True))
    assert plan.split_ends.tolist() == [batch.positions[token] + 1 for token, _ in split]
    assert plan.max_segments * SEGMENT >= plan.split_ends.max(initial=0)
