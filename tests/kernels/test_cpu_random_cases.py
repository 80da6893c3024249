"""The compiled kernels against the torch reference, step by step, on random cases: 10,000 of them in ``make soak``."""

import numpy as np
import pytest
import torch

from services.executor.kernels.cpu.kernels import CompiledKernels
from services.executor.kernels.interface import Kernels, LayerCache, QkNorm, Rotary
from services.executor.kernels.reference import ReferenceKernels
from tests.fakes.steps import Row, step

SHAPES = [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 80), (6, 2, 16), (14, 2, 64), (3, 1, 96), (2, 1, 256)]
TOLERANCE = 1e-5
GUARD = 1234.5


def guarded(kernels: Kernels, num_blocks: int, block_size: int, heads: int, dim: int) -> LayerCache:
    """A cache whose every slot tells when somebody has written it."""
    cache = kernels.new_cache(num_blocks, block_size, heads, dim, torch.float32)
    for part in cache:
        part.fill_(GUARD)
    return cache


def one_case(number: int) -> None:
    draw = np.random.default_rng(number)
    generator = torch.Generator().manual_seed(number)
    heads, kv_heads, dim = SHAPES[draw.integers(len(SHAPES))]
    block_size = int(draw.choice([16, 16, 32, 48]))
    window = int(draw.choice([0, 0, 1, 5, 40, 300]))
    lens = [int(n) for n in draw.integers(1, draw.choice([20, 80, 600]), int(draw.integers(1, 6)))]
    needed = [-(-n // block_size) for n in lens]
    order = draw.permutation(sum(needed) + 2).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in needed]
    starts = [int(draw.integers(0, n)) for n in lens]
    tokens = np.zeros(max(lens), np.int32)
    norm = None
    if draw.random() < 0.3:
        norm = QkNorm(*(torch.randn(dim, generator=generator) for _ in range(2)), 1e-6)
    angles = torch.outer(torch.arange(max(lens) + 1.0), 10000 ** (-torch.arange(0, dim, 2) / dim))
    rotary = Rotary(angles.cos(), angles.sin()) if draw.random() < 0.8 else None
    sides = [(kernels, guarded(kernels, sum(needed) + 2, block_size, kv_heads, dim)) for kernels in KERNELS]
    written = 0
    for parts in ([(0, start) for start in starts], [(s, n - s) for s, n in zip(starts, lens, strict=True)]):
        rows = [Row(tokens, *part, table) for part, table in zip(parts, blocks, strict=True) if part[1]]
        if not rows:
            continue
        batch = step(rows, block_size)
        written += len(batch.token_ids)
        qkv = torch.randn(len(batch.token_ids), heads + 2 * kv_heads, dim, generator=generator)
        found = []
        for kernels, cache in sides:
            attention = kernels.step(batch, block_size)
            queries = attention.rotate_and_write(qkv.clone(), heads, rotary, norm, cache)
            found.append(attention.attend(queries.contiguous(), cache, dim**-0.5, window))
        torch.testing.assert_close(found[0], found[1], rtol=TOLERANCE, atol=TOLERANCE, msg=f"case {number}")
    for _, cache in sides:
        for part in cache:
            untouched = int((part == GUARD).sum()) // (kv_heads * dim)
            assert untouched == (sum(needed) + 2) * block_size - written, f"case {number}"


KERNELS: list[Kernels] = [CompiledKernels(), ReferenceKernels(torch.device("cpu"))]


def test_compiled_kernels_equal_the_reference() -> None:
    for number in range(250):
        one_case(number)


@pytest.mark.soak
def test_compiled_kernels_equal_the_reference_in_ten_thousand_cases() -> None:
    for number in range(10_000):
        one_case(number)
