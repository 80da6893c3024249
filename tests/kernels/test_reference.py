"""The reference kernels against attention written out token by token: K1 to K4 of the design."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels import reference
from services.executor.kernels.interface import LayerCache, QkNorm, Rotary
from services.executor.kernels.reference import ReferenceKernels
from tests.fakes.steps import Row, step

CPU = torch.device("cpu")
KERNELS = ReferenceKernels(CPU)
FLAT = Rotary(torch.ones(1, 1), torch.zeros(1, 1))
CANARY = float("nan")


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int = 0


@dataclass
class World:
    """Sequences with given contexts, of which the last ``count`` tokens are this step's; blocks are dealt at random."""

    shape: Shape
    rows: list[tuple[int, int]]
    """(context length, tokens of this step) a row."""
    seed: int

    def __post_init__(self) -> None:
        shape, generator = self.shape, torch.Generator().manual_seed(self.seed)
        self.keys, self.values = (
            [torch.randn(context, shape.kv_heads, shape.head_dim, generator=generator) for context, _ in self.rows]
            for _ in range(2)
        )
        total = sum(count for _, count in self.rows)
        self.queries = torch.randn(total, shape.heads, shape.head_dim, generator=generator)

    def tables(self, seed: int) -> tuple[list[list[int]], int]:
        """Each row's blocks, in random order among some that nobody uses."""
        needed = [-(-context // self.shape.block_size) for context, _ in self.rows]
        order = np.random.default_rng(seed).permutation(sum(needed) + 4).tolist()
        return [[order.pop() for _ in range(count)] for count in needed], sum(needed) + 4

    def run(self, table_seed: int = 0, only: int | None = None) -> tuple[Tensor, LayerCache, LayerCache, StepBatch]:
        """Outputs, the cache before and after, and the step; with ``only``, of that row alone."""
        shape = self.shape
        blocks, num_blocks = self.tables(table_seed)
        cache = KERNELS.new_cache(num_blocks, shape.block_size, shape.kv_heads, shape.head_dim, torch.float32)
        for part, wanted in zip(cache, (self.keys, self.values), strict=True):
            part.fill_(CANARY)
            for (context, count), table, content in zip(self.rows, blocks, wanted, strict=True):
                slots = np.arange(context - count)
                where = np.array(table)[slots // shape.block_size], slots % shape.block_size
                part[where] = content[: context - count]
        picked = [i for i in range(len(self.rows)) if only in (None, i)]
        contexts = [self.rows[i] for i in picked]
        batch = step(
            [Row([0] * c, c - n, n, blocks[i]) for (c, n), i in zip(contexts, picked, strict=True)], shape.block_size
        )
        before = LayerCache(cache.keys.clone(), cache.values.clone())
        starts = np.cumsum([0, *(count for _, count in self.rows)])
        queries = torch.cat([self.queries[starts[i] : starts[i + 1]] for i in picked])
        fresh = [
            torch.cat([part[i][c - n :] for (c, n), i in zip(contexts, picked, strict=True)])
            for part in (self.keys, self.values)
        ]
        positions = int(batch.context_lens.max())
        flat = Rotary(FLAT.cos.expand(positions, shape.head_dim // 2), FLAT.sin.expand(positions, shape.head_dim // 2))
        attention = KERNELS.step(batch, shape.block_size)
        turned = attention.rotate_and_write(torch.cat([queries, *fresh], dim=1), shape.heads, flat, None, cache)
        return attention.attend(turned, cache, 0.3, shape.window), before, cache, batch

    def expected(self) -> Tensor:
        """Attention token by token, in float64."""
        shape, out, token = self.shape, [], 0
        for (context, count), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            for position in range(context - count, context):
                first = max(0, position - shape.window + 1) if shape.window else 0
                for head in range(shape.heads):
                    kv_head = head // (shape.heads // shape.kv_heads)
                    seen = keys[first : position + 1, kv_head].double()
                    weights = torch.softmax(seen @ self.queries[token, head].double() * 0.3, 0)
                    out.append(weights @ values[first : position + 1, kv_head].double())
                token += 1
        return torch.stack(out).view(token, shape.heads, shape.head_dim)


shapes = st.builds(
    lambda kv_heads, per_kv, head_dim, block_size, window: Shape(
        kv_heads * per_kv, kv_heads, head_dim, block_size, window
    ),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3]),
    st.sampled_from([4, 16]),
    st.sampled_from([1, 2, 4, 16]),
    st.sampled_from([0, 0, 1, 5]),
)
contexts = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.just(1) | st.integers(1, n)))
worlds = st.builds(World, shapes, st.lists(contexts, min_size=1, max_size=7), st.integers(0, 2**31))


@settings(max_examples=60, deadline=None)
@given(worlds)
def test_k1_equals_attention_written_out(world: World) -> None:
    found = world.run()[0]
    assert torch.isfinite(found).all(), "something outside a row's context was read"
    torch.testing.assert_close(found.double(), world.expected(), rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(worlds)
def test_k2_slots_that_are_not_named_are_unchanged(world: World) -> None:
    _, before, after, batch = world.run()
    for old, new in zip(before, after, strict=True):
        named = torch.zeros(old.shape[0] * old.shape[1], dtype=torch.bool)
        named[torch.as_tensor(batch.slot_mapping)] = True
        assert torch.equal(new.flatten(0, 1)[~named].nan_to_num(7e7), old.flatten(0, 1)[~named].nan_to_num(7e7))
        assert torch.isfinite(new.flatten(0, 1)[named]).all()


@settings(max_examples=30, deadline=None)
@given(worlds)
def test_k3_renaming_blocks_changes_nothing(world: World) -> None:
    assert torch.equal(world.run(table_seed=0)[0], world.run(table_seed=1)[0])


@settings(max_examples=30, deadline=None)
@given(worlds, st.data())
def test_k4_other_rows_do_not_matter(world: World, data: st.DataObject) -> None:
    """To float32 precision: the reference pads rows of about equal size, so the last bits may move."""
    row = data.draw(st.integers(0, len(world.rows) - 1))
    starts = np.cumsum([0, *(count for _, count in world.rows)])
    together = world.run()[0][starts[row] : starts[row + 1]]
    torch.testing.assert_close(world.run(only=row)[0], together, rtol=1e-5, atol=1e-5)


def test_groups_are_cut_to_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Shape(6, 3, 16, 4), [(37, 1), (40, 1), (35, 1), (33, 20), (34, 18), (3, 3), (40, 40)], 1)
    whole = world.run()[0]
    monkeypatch.setattr(reference, "_MAX_GATHERED", 80)
    monkeypatch.setattr(reference, "_MAX_SCORES", 900)
    torch.testing.assert_close(world.run()[0], whole, rtol=1e-5, atol=1e-5)


def test_rotation_turns_pairs_by_position_after_the_norm() -> None:
    """cos a - i sin a on (x, y) pairs half a head apart, at each token's own position."""
    frequencies = torch.tensor([1.0, 0.1])
    angles = torch.outer(torch.arange(50.0), frequencies)
    rotary = Rotary(angles.cos(), angles.sin())
    qkv = torch.randn(3, 1 + 2, 4, generator=torch.Generator().manual_seed(3))
    norm = QkNorm(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.full((4,), 0.5), 1e-6)
    cache = KERNELS.new_cache(20, 4, 1, 4, torch.float32)
    batch = step([Row([0] * 42, 39, 3, list(range(11)))], 4)
    queries = KERNELS.step(batch, 4).rotate_and_write(qkv, 1, rotary, norm, cache)
    for part, weight, found in ((0, norm.query_D, queries[:, 0]), (1, norm.key_D, cache.keys.view(-1, 4)[39:42])):
        plain = qkv[:, part] * torch.rsqrt(qkv[:, part].pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        turned = torch.complex(plain[:, :2], plain[:, 2:]) * torch.polar(torch.ones(3, 2), angles[39:42])
        torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], 1))
    assert torch.equal(cache.values.view(-1, 4)[39:42], qkv[:, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_does_not_depend_on_the_number_of_rows(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(192, 576, generator=generator) * 0.05).to(dtype)
    added = torch.randn(192, generator=generator).to(dtype) if bias else None
    product = KERNELS.linear(weight, added)
    x = torch.randn(64, 576, generator=generator).to(dtype)
    whole = product(x)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, added))
    for rows in (1, 2, 3, 7, 8, 33):
        assert torch.equal(product(x[:rows].contiguous()), whole[:rows]), rows


def test_add_rms_norm_adds_in_place() -> None:
    x, residual, weight = torch.randn(3, 5), torch.randn(3, 5), torch.randn(5)
    summed = x + residual
    expected = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(KERNELS.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, summed)
    torch.testing.assert_close(KERNELS.add_rms_norm(summed, None, weight, 1e-5), expected)
