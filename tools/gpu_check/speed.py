"""How near each kernel comes to the device's memory bandwidth or matrix rate, both measured here."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from services.executor.kernels.interface import Rotary
from services.executor.kernels.triton.kernels import TritonKernels
from tools.gpu_check.invariance import Model
from tools.gpu_check.worlds import BLOCK_SIZE, Shape, World, lay_out

Timer = Callable[[Callable[[], object]], float]
"""Seconds that a call takes on the device, its operands not in the cache."""


class Limits(NamedTuple):
    """What the device does at best."""

    bytes_per_s: float
    flop_per_s: float


class Rate(NamedTuple):
    """One kernel in one shape."""

    what: str
    seconds: float
    bytes_moved: float
    flops: float

    def shares(self, limits: Limits) -> tuple[float, float]:
        """Of the bandwidth, of the matrix rate."""
        by_memory = self.bytes_moved / self.seconds / limits.bytes_per_s
        return by_memory, self.flops / self.seconds / limits.flop_per_s


def limits(dtype: torch.dtype, device: torch.device, time: Timer, size: int = 8192) -> Limits:
    """A copy of much memory (read and written), and the library's product of two large square matrices."""
    source = torch.empty(16 * size * size, dtype=dtype, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / time(lambda: target.copy_(source))
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return Limits(copied, 2 * size**3 / time(lambda: a @ b))


def products(
    kernels: TritonKernels, shape: Shape, dtype: torch.dtype, time: Timer, counts: tuple[int, ...]
) -> Iterator[tuple[Rate, Rate]]:
    """Each product, ours and the library's, whose ratio is what invariance costs."""
    world = World([1], shape, dtype, kernels.device)
    for name, (columns, depth) in shape.products().items():
        weight = world.random(columns, depth, scale=depth**-0.5)
        product = kernels.linear(weight, None)
        for count in counts:
            x = world.random(count, depth)
            moved = (weight.numel() + x.numel() + count * columns) * dtype.itemsize
            flops = 2 * count * columns * depth
            what = f"product {name} {columns} x {depth}, {count} rows"
            yield (
                Rate(what, time(lambda: product(x)), moved, flops),  # noqa: B023 - called at once
                Rate("library", time(lambda: F.linear(x, weight)), moved, flops),  # noqa: B023
            )


def attention(
    kernels: TritonKernels, shape: Shape, dtype: torch.dtype, time: Timer, mixes: list[tuple[int, int, int]]
) -> Iterator[Rate]:
    """Attention of ``mixes``: rows, context of each, tokens computed of each."""
    for num_rows, context, count in mixes:
        world = World([context] * num_rows, shape, dtype, kernels.device)
        cache = world.cache(kernels.new_cache)
        queries = world.random(num_rows * count, shape.heads, shape.head_dim)
        step = kernels.step(lay_out([world.row(i, count) for i in range(num_rows)]), BLOCK_SIZE)
        kv_bytes = 2 * num_rows * context * shape.kv_heads * shape.head_dim * dtype.itemsize
        pairs = num_rows * count * (context - (count - 1) / 2)
        seconds = time(lambda: step.attend(queries, cache, 0.1, 0))  # noqa: B023 - called at once
        what = f"attention {num_rows} x {count} tokens of {context}"
        yield Rate(what, seconds, kv_bytes + 2 * queries.nbytes, 4 * pairs * shape.heads * shape.head_dim)


def elementwise(
    kernels: TritonKernels, shape: Shape, dtype: torch.dtype, time: Timer, counts: tuple[int, ...]
) -> Iterator[Rate]:
    """What lies between the products, which can only be as fast as memory."""
    for count in counts:
        world = World([count], shape, dtype, kernels.device)
        x, residual, weight = (world.random(*size) for size in ((count, shape.hidden),) * 2 + ((shape.hidden,),))
        seconds = time(lambda: kernels.add_rms_norm(x, residual, weight, 1e-5))  # noqa: B023
        yield Rate(f"add and RMS norm, {count} rows", seconds, 4 * x.nbytes, 0)
        gate_up = world.random(count, 2 * shape.inner)
        yield Rate(f"SiLU, {count} rows", time(lambda: kernels.silu_mul(gate_up)), 1.5 * gate_up.nbytes, 0)  # noqa: B023
        turns = torch.ones(count, shape.head_dim // 2, device=kernels.device)
        rotary, cache = Rotary(turns, turns), world.cache(kernels.new_cache)
        qkv = world.random(count, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        step = kernels.step(lay_out([world.row(0, count)]), BLOCK_SIZE)
        seconds = time(lambda: step.rotate_and_write(qkv, shape.heads, rotary, None, cache))  # noqa: B023
        yield Rate(f"rotary and KV write, {count} rows", seconds, 2 * qkv.nbytes, 0)


def decode_steps(model: Model, time: Timer, rows: int, context: int) -> tuple[float, float]:
    """Seconds of a decode step to its logits, copies and launches included: captured, and not."""
    decodes = [(context, 1)] * rows
    return time(lambda: model.run(decodes, True)), time(lambda: model.run(decodes, False))
