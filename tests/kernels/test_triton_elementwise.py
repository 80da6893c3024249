"""Triton's RMSNorm, SiLU and product: equal to plain torch, and a row does not depend on how many there are.

Rotary and the KV write are tested with attention.
"""

import pytest
import torch
from torch import Tensor

from services.executor.kernels.reference import ReferenceKernels
from services.executor.kernels.triton import product as product_module
from services.executor.kernels.triton.kernels import TritonKernels
from services.executor.kernels.triton.product import tile_columns
from tests.fakes.triton_device import DEVICE, DTYPES, TOLERANCE

KERNELS = TritonKernels(DEVICE)
PLAIN = ReferenceKernels(DEVICE)


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 21])
def test_add_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = random(dtype, 9, width), random(dtype, 9, width) * 3, random(dtype, width)
    expected_sum = residual.clone()
    expected = PLAIN.add_rms_norm(x, expected_sum, weight, 1e-5)
    alone_sum = residual[4:5].clone()
    found = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    close(found, expected)
    assert torch.equal(residual, expected_sum)
    assert torch.equal(KERNELS.add_rms_norm(x[4:5].contiguous(), alone_sum, weight, 1e-5), found[4:5])
    close(KERNELS.add_rms_norm(x, None, weight, 1e-5), PLAIN.add_rms_norm(x, None, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 21])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    gate_up = random(dtype, 5, 2 * width) * 3
    gate, up = gate_up.float().chunk(2, dim=-1)
    found = KERNELS.silu_mul(gate_up)
    close(found, (torch.nn.functional.silu(gate) * up).to(dtype))
    extreme = torch.tensor([[-1e4, 1e4, 1.0, 1.0]], dtype=dtype, device=DEVICE)
    assert KERNELS.silu_mul(extreme).tolist() == [[0.0, extreme[0, 1].item()]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "depth", "bias"), [(70, 192, False), (70, 192, True), (33, 100, True), (130, 70, False)]
)
def test_a_product_does_not_depend_on_the_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, columns: int, depth: int, bias: bool
) -> None:
    monkeypatch.setattr(product_module, "_FEW_PROGRAMS", 1)  # so that each width of tile has its turn
    weight = random(dtype, columns, depth) * 0.1
    added = random(dtype, columns) if bias else None
    x = random(dtype, 67, depth)
    product = KERNELS.linear(weight, added)
    whole = product(x)
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if added is None else added.float())
    close(whole, expected.to(dtype))
    for start, stop in ((0, 1), (66, 67), (5, 8), (1, 66)):
        assert torch.equal(product(x[start:stop].contiguous()), whole[start:stop]), (start, stop)


def test_only_the_weights_choose_a_tile() -> None:
    assert [tile_columns(columns) for columns in (1, 576, 8191, 8192, 16384, 151936)] == [32, 32, 32, 64, 128, 128]
