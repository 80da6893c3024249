"""Every compiled kernel on memory of exactly its size; run with a library that AddressSanitizer watches.

``python -m tests.kernels.sanitized LIBRARY`` under ``LD_PRELOAD=libasan``: torch's memory then has guard zones around
it, and the first touch beyond a tensor ends the process. Called by ``test_cpu_sanitizer``.
"""

import sys
from pathlib import Path

import torch

from services.executor.kernels.cpu.bindings import CpuLibrary, new_cache
from services.executor.kernels.cpu.decoder import CompiledDecoder
from services.executor.kernels.cpu.step import CompiledAttention
from services.executor.kernels.interface import LayerCache
from tests.fakes.decoder_layers import HIDDEN, SHAPE, layers_of
from tests.fakes.steps import Row, step


def attention_and_rotary(kernels: CpuLibrary, dtype: torch.dtype, shape: tuple[int, int, int], number: int) -> None:
    """A step of decodes and chunks, in a pool without a block to spare."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(number)
    block_size = (16, 32)[number % 2]
    lens = torch.randint(1, 300, (4,), generator=generator, dtype=torch.int32)
    counts = [1, int(lens[1]), max(1, int(lens[2]) // 2), 1]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    needed = [-(-int(n) // block_size) for n in lens]
    blocks = torch.randperm(sum(needed), generator=generator).int()
    tables = torch.full((4, max(needed)), -1, dtype=torch.int32)
    for row, part in zip(tables, blocks.split(needed), strict=True):
        row[: len(part)] = part
    cache = new_cache(sum(needed), kv_heads, block_size, dim, dtype)
    positions = torch.cat([torch.arange(int(n) - c, int(n)) for n, c in zip(lens, counts, strict=True)])
    rows = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    slots = tables[rows, positions // block_size].long() * block_size + positions % block_size
    angles = torch.rand(int(lens.max()), dim // 2)
    norm = torch.rand(dim).to(dtype)
    qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    query = kernels.rotary_write(
        qkv, angles, angles.clone(), positions.int(), slots, cache, heads, norm, norm.clone(), 1e-6
    )
    for window in (0, 17):
        kernels.paged_attention(query, cache, tables, starts, lens, 0.125, window)


def rows(kernels: CpuLibrary, dtype: torch.dtype, num_rows: int, width: int) -> None:
    """Norm, activation and products of widths that fill no vector."""
    x = torch.randn(num_rows, width).to(dtype)
    kernels.add_rms_norm(x, x.clone(), torch.ones(width, dtype=dtype), 1e-5)
    kernels.silu_mul(torch.randn(num_rows, 2 * width).to(dtype))
    weight, bias = torch.randn(width + 7, width).to(dtype), torch.randn(width + 7).to(dtype)
    kernels.int8_linear(weight, bias)(x)
    if dtype is torch.bfloat16 and width % 2 == 0 and kernels.has_bfloat16_product():
        kernels.bfloat16_linear(weight, bias)(x)


def decoder(kernels: CpuLibrary, dtype: torch.dtype, int8: bool) -> None:
    """All layers in one call, in a pool without a block to spare."""
    linear = kernels.int8_linear if int8 else kernels.bfloat16_linear
    layers = layers_of(linear, dtype, torch.Generator().manual_seed(1))
    whole = CompiledDecoder(kernels.decode, layers, SHAPE, int8)
    caches = [LayerCache(*new_cache(5, SHAPE.num_kv_heads, 16, SHAPE.head_dim, dtype)) for _ in layers]
    tokens = [0] * 40
    for parts in ([(0, 33), (0, 1)], [(33, 1), (1, 19)]):
        rows = [Row(tokens, *part, blocks) for part, blocks in zip(parts, ([4, 0, 2], [1, 3]), strict=True)]
        batch = step(rows, 16)
        whole(torch.randn(len(batch.token_ids), HIDDEN).to(dtype), CompiledAttention(kernels, batch), caches)


def main(library: str) -> None:
    kernels = CpuLibrary(Path(library))
    for dtype in (torch.float32, torch.bfloat16):
        for number, shape in enumerate([(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 80), (6, 2, 16), (14, 2, 64)]):
            attention_and_rotary(kernels, dtype, shape, number)
        for num_rows in (1, 2, 11, 13, 25):
            for width in (1, 6, 16, 33, 50, 576):
                rows(kernels, dtype, num_rows, width)
        decoder(kernels, dtype, int8=True)
    if kernels.has_bfloat16_product():
        decoder(kernels, torch.bfloat16, int8=False)
    print("clean")


if __name__ == "__main__":
    main(sys.argv[1])
