"""Every kernel against its definition written out in float64 (rotary and the KV write: plain torch)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.interface import LayerCache, QkNorm, Rotary
from services.executor.kernels.reference import ReferenceKernels
from services.executor.kernels.triton.kernels import TritonKernels
from tools.gpu_check.worlds import BLOCK_SIZE, Shape, World, lay_out

ALLOWED = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference, in terms of the largest value expected."""


class Finding(NamedTuple):
    """One check: what was looked at, how far off it was, and how far it may be."""

    what: str
    off: float
    allowed: float

    @property
    def fine(self) -> bool:
        """False for a NaN too."""
        return self.off <= self.allowed


def check(
    kernels: TritonKernels, shape: Shape, dtype: torch.dtype, rows: Sequence[tuple[int, int]]
) -> Iterator[Finding]:
    """Check each kernel at ``shape``; ``rows`` of the step are (context, tokens computed)."""
    world = World([context for context, _ in rows], shape, dtype, kernels.device)
    batch = lay_out([world.row(i, count) for i, (_, count) in enumerate(rows)])
    for window in (0, 100):
        yield _finding(f"attention, window {window}", *_attention(kernels, world, batch, window))
    yield from _rotary(kernels, world, batch)
    x, residual = world.random(len(batch.token_ids), shape.hidden), world.random(len(batch.token_ids), shape.hidden)
    weight, total = world.random(shape.hidden), (residual + x).double()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    yield _finding("add and RMS norm", kernels.add_rms_norm(x, residual, weight, 1e-5), normed)
    gate_up = world.random(len(batch.token_ids), 2 * shape.inner, scale=2)
    gate, up = gate_up.double().chunk(2, dim=-1)
    yield _finding("SiLU", kernels.silu_mul(gate_up), torch.nn.functional.silu(gate) * up)
    for name, (columns, depth) in shape.products().items():
        matrix, bias = world.random(columns, depth, scale=depth**-0.5), world.random(columns)
        rows_in = world.random(130, depth)
        expected = rows_in.double() @ matrix.double().T + bias.double()
        yield _finding(f"product {name} {columns} x {depth}", kernels.linear(matrix, bias)(rows_in), expected)


def _finding(what: str, found: Tensor, expected: Tensor) -> Finding:
    off = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    return Finding(what, off.item(), ALLOWED[found.dtype])


def _attention(kernels: TritonKernels, world: World, batch: StepBatch, window: int) -> tuple[Tensor, Tensor]:
    shape, cache = world.shape, world.cache(kernels.new_cache)
    queries = world.random(len(batch.token_ids), shape.heads, shape.head_dim)
    scale = shape.head_dim**-0.5
    found = kernels.step(batch, BLOCK_SIZE).attend(queries, cache, scale, window)
    expected = []
    for row, context in enumerate(batch.context_lens.tolist()):
        first, last = batch.query_starts[row : row + 2].tolist()
        blocks = torch.as_tensor(batch.block_tables[row], device=world.device)[: -(-context // BLOCK_SIZE)]
        keys, values = (
            part[blocks]
            .transpose(1, 2)
            .flatten(0, 1)[:context]
            .double()
            .repeat_interleave(shape.heads // shape.kv_heads, 1)
            for part in cache
        )
        scores = torch.einsum("qhd,nhd->hqn", queries[first:last].double(), keys) * scale
        positions = torch.arange(context, device=world.device)
        own = positions[context - (last - first) :, None]
        seen = (positions <= own) & ((positions > own - window) if window else True)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        expected.append(torch.einsum("hqn,nhd->qhd", weights, values))
    return found, torch.cat(expected)


def _rotary(kernels: TritonKernels, world: World, batch: StepBatch) -> Iterator[Finding]:
    shape, plain = world.shape, ReferenceKernels(kernels.device)
    angles = torch.outer(torch.arange(int(batch.context_lens.max())), torch.rand(shape.head_dim // 2) * 2)
    rotary = Rotary(angles.cos().to(world.device), angles.sin().to(world.device))
    qkv = world.random(len(batch.token_ids), shape.heads + 2 * shape.kv_heads, shape.head_dim)
    for norm in (None, QkNorm(world.random(shape.head_dim), world.random(shape.head_dim), 1e-6)):
        cache = world.cache(kernels.new_cache)
        expected_cache = LayerCache(*(part.transpose(1, 2).contiguous() for part in cache))
        found = kernels.step(batch, BLOCK_SIZE).rotate_and_write(qkv, shape.heads, rotary, norm, cache)
        expected = plain.step(batch, BLOCK_SIZE).rotate_and_write(qkv, shape.heads, rotary, norm, expected_cache)
        name = "rotary with norms" if norm else "rotary"
        yield _finding(name, found, expected)
        for part, plain_part in zip(cache, expected_cache, strict=True):
            yield _finding(f"{name}: KV", part.transpose(1, 2).nan_to_num(99), plain_part.nan_to_num(99))
