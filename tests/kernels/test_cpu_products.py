"""The compiled matrix products: right, the same bits for any number of rows, and nobody's NaN is anybody else's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.kernels import int8
from services.executor.kernels.cpu.bindings import CpuLibrary

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels() -> CpuLibrary:
    return CpuLibrary()


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.integers(1, 130), st.integers(1, 200), st.booleans())
def test_int8_equals_plain_torch_to_the_bit(
    kernels: CpuLibrary, dtype: torch.dtype, rows: int, columns: int, depth: int, with_bias: bool
) -> None:
    x, weight = _random(rows, depth).to(dtype), _random(columns, depth, seed=1).to(dtype)
    bias = _random(columns).to(dtype) if with_bias else None
    found = kernels.int8_linear(weight, bias)(x)
    assert torch.equal(found, int8.plain(weight, bias)(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_near_the_product_it_stands_for(kernels: CpuLibrary, dtype: torch.dtype) -> None:
    x, weight = _random(40, 576).to(dtype), _random(96, 576, seed=1).to(dtype)
    exact = x.double() @ weight.double().T
    error = kernels.int8_linear(weight, None)(x).double() - exact
    assert error.norm() < 0.02 * exact.norm()


def test_one_large_input_leaves_the_others_their_precision(kernels: CpuLibrary) -> None:
    x, weight = _random(4, 576), _random(96, 576, seed=1)
    x[:, 100] = 300
    weight[:, 100] = 0  # it takes the scale, and gives nothing to the result
    exact = x.double() @ weight.double().T
    error = kernels.int8_linear(weight, None)(x).double() - exact
    assert error.norm() < 0.2 * exact.norm()  # without turning the inputs first: 0.7


@pytest.mark.parametrize("depth", [1, 63, 64, 130, 576])
def test_turning_keeps_products_and_lengths(depth: int) -> None:
    x, weight = _random(5, depth).double(), _random(7, depth, seed=1).double()
    torch.testing.assert_close(int8.rotate(x) @ int8.rotate(weight).T, x @ weight.T)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [3, 574])
def test_a_row_that_is_not_finite_spoils_itself_alone(kernels: CpuLibrary, bad: float, place: int) -> None:
    x, weight = _random(5, 575), _random(33, 575, seed=1)
    x[1] = 0
    expected = kernels.int8_linear(weight, None)(x)
    assert not expected[1].any()
    x[2, place] = bad
    found = kernels.int8_linear(weight, None)(x)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    assert torch.equal(int8.plain(weight, None)(x).isnan(), found.isnan())


def test_rows_and_columns_of_zeros_and_of_next_to_nothing(kernels: CpuLibrary) -> None:
    x, weight = _random(4, 64), _random(8, 64, seed=1)
    x[0], x[1], weight[2] = 0, 1e-44, 0
    found = kernels.int8_linear(weight, None)(x)
    assert found.isfinite().all()
    assert not found[:2].any()
    assert not found[:, 2].any()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.integers(1, 130), st.integers(1, 100), st.booleans())
def test_bfloat16_is_the_product(
    kernels: CpuLibrary, rows: int, columns: int, half_depth: int, with_bias: bool
) -> None:
    if not kernels.has_bfloat16_product():
        pytest.skip("this machine has no bfloat16 dot product")
    x, weight = (_random(n, 2 * half_depth, seed=i).bfloat16() for i, n in enumerate((rows, columns)))
    bias = _random(columns).bfloat16() if with_bias else None
    exact = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(kernels.bfloat16_linear(weight, bias)(x).float(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["bfloat16_linear", "int8_linear"])
def test_rows_are_the_same_for_any_number_of_them(kernels: CpuLibrary, kind: str) -> None:
    if kind == "bfloat16_linear" and not kernels.has_bfloat16_product():
        pytest.skip("this machine has no bfloat16 dot product")
    x, weight = _random(100, 576).bfloat16(), _random(97, 576, seed=1).bfloat16()
    linear = getattr(kernels, kind)(weight, _random(97).bfloat16())
    together = linear(x)
    for size in (*range(1, 15), 24, 25, 99):
        for start in {0, min(37, 100 - size), 100 - size}:
            assert torch.equal(linear(x[start : start + size]), together[start : start + size])
