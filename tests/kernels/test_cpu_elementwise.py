"""The compiled kernels between the matrix products, against what a plain torch model computes."""

import pytest
import torch

from services.executor.kernels.cpu.bindings import CpuLibrary, new_cache

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 3, 8, 130]


@pytest.fixture(scope="module")
def kernels() -> CpuLibrary:
    return CpuLibrary()


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [576, 40])
def test_add_rms_norm(kernels: CpuLibrary, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual, weight = (_random(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
    _close(kernels.add_rms_norm(x, None, weight, 1e-5), _rms_norm(x, weight, 1e-5))
    total = residual + x
    _close(kernels.add_rms_norm(x, residual, weight, 1e-5), _rms_norm(total, weight, 1e-5))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1536, 21])
def test_silu_mul(kernels: CpuLibrary, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = _random(rows, 2 * width, dtype=dtype) * 20
    _close(kernels.silu_mul(gate_up), torch.nn.functional.silu(gate_up[:, :width]) * gate_up[:, width:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_rotary_write(kernels: CpuLibrary, dtype: torch.dtype, rows: int, normed: bool, dim: int) -> None:
    heads, kv_heads, block_size, blocks = 6, 2, 16, 12
    generator = torch.Generator().manual_seed(rows)
    qkv = _random(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.outer(torch.arange(300.0), 1 / 10000 ** (torch.arange(0, dim, 2) / dim))
    positions = torch.randint(0, 300, (rows,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(blocks * block_size, generator=generator)[:rows]
    norms = [_random(dim, dtype=dtype), _random(dim + 1, dtype=dtype)[1:].clone()] if normed else [None, None]
    cache = new_cache(blocks, kv_heads, block_size, dim, dtype)
    for part in cache:
        part.fill_(7.0)

    query = kernels.rotary_write(
        qkv, angles.cos(), angles.sin(), positions, slots, cache, heads, norms[0], norms[1], 1e-6
    )

    x = qkv.view(rows, -1, dim)
    cos, sin = (f(angles)[positions.long()].repeat(1, 2).to(dtype)[:, None] for f in (torch.cos, torch.sin))

    def turned(part: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        part = part if norm is None else _rms_norm(part, norm, 1e-6)
        return part * cos + torch.cat([-part[..., dim // 2 :], part[..., : dim // 2]], -1) * sin

    _close(query, turned(x[:, :heads], norms[0]))
    written_keys = cache.keys.permute(0, 3, 1, 2, 4).reshape(blocks * block_size, kv_heads, dim)
    written_values = cache.values.permute(0, 2, 4, 1, 3).reshape(blocks * block_size, kv_heads, dim)
    _close(written_keys[slots], turned(x[:, heads : heads + kv_heads], norms[1]))
    assert torch.equal(written_values[slots], x[:, heads + kv_heads :])
    untouched = torch.ones(blocks * block_size, dtype=torch.bool)
    untouched[slots] = False
    assert (written_keys[untouched] == 7.0).all()
    assert (written_values[untouched] == 7.0).all()
