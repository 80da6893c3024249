"""A matrix product whose rows do not depend on how many there are: one tile and one order of K for every row count.

Called by ``kernels``. Library products choose tiles, and split K, by the number of rows; here only the shape of the
weights chooses. Each element is one sum over K in tiles of fixed depth from column 0 on, in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.executor.kernels.interface import Linear

_ROWS = 64
_FEW_PROGRAMS = 128
"""About one per multiprocessor of a large device: narrower tiles where wider ones would leave some without work."""


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One tile of ``out`` = ``x`` [rows, depth] @ ``weight`` [columns, depth] transposed, plus ``bias``.

    Neighbouring programs share a tile of the weights, which are the larger operand.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_row, is_column = row < num_rows, column < num_columns
    inner = tl.arange(0, DEPTH)
    x_place = x + tl.where(is_row, row, 0)[:, None] * depth + inner[None, :]
    weight_place = weight + tl.where(is_column, column, 0)[:, None] * depth + inner[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for at in range(0, depth, DEPTH):
        if EVEN:
            x_tile, weight_tile = tl.load(x_place), tl.load(weight_place)
        else:
            real = (at + inner < depth)[None, :]
            x_tile, weight_tile = tl.load(x_place, mask=real, other=0.0), tl.load(weight_place, mask=real, other=0.0)
        total = tl.dot(x_tile, tl.trans(weight_tile), total, input_precision="ieee")
        x_place += DEPTH
        weight_place += DEPTH
    if BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_place = out + row[:, None] * num_columns + column[None, :]
    tl.store(out_place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def tile_columns(num_columns: int) -> int:
    """Width of a tile, from the shape of the weights alone."""
    for width in (128, 64):
        if num_columns >= width * _FEW_PROGRAMS:
            return width
    return 32


def tile_depth(dtype: torch.dtype) -> int:
    """Columns of the operands that a program reads at once."""
    return 32 if dtype is torch.float32 else 64


def product(weight: Tensor, bias: Tensor | None) -> Linear:
    """A product with ``weight`` [columns, depth] and ``bias`` [columns], which are used as they lie."""
    weight = weight.contiguous()
    num_columns, depth = weight.shape
    width, inner = tile_columns(num_columns), tile_depth(weight.dtype)

    def linear(x_TC: Tensor) -> Tensor:
        num_rows = len(x_TC)
        assert x_TC.is_contiguous()
        assert x_TC.dtype is weight.dtype
        out = x_TC.new_empty(num_rows, num_columns)
        product_kernel[(triton.cdiv(num_rows, _ROWS), triton.cdiv(num_columns, width))](
            x_TC,
            weight,
            weight if bias is None else bias,
            out,
            num_rows,
            num_columns,
            depth,
            ROWS=_ROWS,
            COLUMNS=width,
            DEPTH=inner,
            EVEN=depth % inner == 0,
            BIAS=bias is not None,
            num_warps=4,
            num_stages=3,
        )
        return out

    return linear
