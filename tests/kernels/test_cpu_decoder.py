"""The compiled decoder in one piece gives the bits of the same layers called operation by operation."""

import numpy as np
import pytest
import torch

from services.executor.kernels.cpu.decoder import CompiledDecoder
from services.executor.kernels.cpu.kernels import CompiledKernels
from services.executor.kernels.decoder import ComposedDecoder
from services.executor.kernels.interface import Quantization
from tests.fakes.decoder_layers import HIDDEN, SHAPE, layers_of
from tests.fakes.steps import Row, step

BLOCK_SIZE = 16


@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.bfloat16, "none"), (torch.bfloat16, "int8"), (torch.float32, "int8")]
)
def test_one_piece_equals_operation_by_operation(dtype: torch.dtype, quantization: Quantization) -> None:
    kernels = CompiledKernels(quantization)
    generator = torch.Generator().manual_seed(0)
    layers = layers_of(kernels.linear, dtype, generator)
    whole = kernels.decoder(layers, SHAPE)
    if not isinstance(whole, CompiledDecoder):
        pytest.skip("this machine has no bfloat16 dot product")
    sides = [
        (decoder, [kernels.new_cache(40, BLOCK_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim, dtype) for _ in layers])
        for decoder in (whole, ComposedDecoder(kernels, layers, SHAPE))
    ]
    blocks = np.random.default_rng(0).permutation(40).tolist()
    tables = [blocks[:20], blocks[20:22], blocks[22:]]
    tokens = np.zeros(400, np.int32)
    for parts in ([(0, 300), (0, 5), (0, 17)], [(300, 1), (5, 20), (17, 200)], [(301, 1)], [(25, 1)]):
        rows = [Row(tokens, *part, table) for part, table in zip(parts, tables, strict=False)]
        batch = step(rows, BLOCK_SIZE)
        embedded = torch.randn(len(batch.token_ids), HIDDEN, generator=generator).to(dtype)
        found = []
        for decoder, caches in sides:
            residual = embedded.clone()
            added = decoder(residual, kernels.step(batch, BLOCK_SIZE), caches)
            found.append((added, residual))
        assert not found[0][0].isnan().any()
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
    for one, other in zip(sides[0][1], sides[1][1], strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    assert all(ns > 0 for ns in whole.take_ns().values())
    assert not any(whole.take_ns().values())
