"""The compiled matrix products: weights laid out once, then called with rows. Made by ``bindings``.

Both give a row the same bits for any number of rows: see ``bf16.cpp`` and ``int8.cpp``.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from services.executor.kernels import int8

_COLUMNS = 32
"""Columns that are packed together; as the C++ has it."""


class LaidOut(ctypes.Structure):
    """``Product`` of products.h: where the weights of one product are."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
    )


class Product:
    """[T, depth] -> [T, columns] with weights that only the compiled function can read."""

    def __init__(
        self,
        function: Callable[..., Any],
        shape: torch.Size,
        dtype: torch.dtype,
        parts: dict[str, Tensor | None],
        *last: int,
    ) -> None:
        """``function`` takes what is laid out, rows, the result, the number of rows and ``last``."""
        self._function, self._dtype, self._last = function, dtype, last
        self._columns, self._depth = shape
        self._parts = parts  # the pointers are valid as long as these live
        pointers = {name: part.data_ptr() for name, part in parts.items() if part is not None}
        self.laid_out = LaidOut(**pointers, columns=self._columns, depth=self._depth)
        self._place = ctypes.addressof(self.laid_out)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows must be contiguous and of the weights' dtype."""
        num_rows, depth = x.shape
        assert depth == self._depth
        assert x.dtype is self._dtype
        assert x.is_contiguous()
        out = x.new_empty(num_rows, self._columns)
        self._function(self._place, x.data_ptr(), out.data_ptr(), num_rows, *self._last)
        return out


def bfloat16_product(function: Callable[..., Any], weight: Tensor, bias: Tensor | None) -> Product:
    """``weight`` [columns, depth] and ``bias`` [columns] bfloat16, depth even."""
    assert weight.dtype is torch.bfloat16
    assert bias is None or bias.dtype is weight.dtype
    assert weight.shape[1] % 2 == 0
    return Product(function, weight.shape, weight.dtype, {"weights": _packed(weight, 2), "bias": bias})


def int8_product(function: Callable[..., Any], weight: Tensor, bias: Tensor | None) -> Product:
    """``weight`` [columns, depth] and ``bias`` [columns] bfloat16 or float32."""
    assert bias is None or bias.dtype is weight.dtype
    values, scales = int8.quantize(weight)
    offsets = values.sum(dim=1, dtype=torch.int32) * 128  # activations are stored plus 128
    parts = {"weights": _packed(values, 4), "scales": scales, "offsets": offsets, "bias": bias}
    return Product(function, weight.shape, weight.dtype, parts, weight.dtype is torch.bfloat16)


def _packed(weight: Tensor, inputs: int) -> Tensor:
    """[columns / 32, depth / inputs, 32, inputs], zeros where the last ones are not full."""
    num_columns, depth = weight.shape
    groups, padded = -(-num_columns // _COLUMNS), -(-depth // inputs) * inputs
    filled = weight.new_zeros(groups * _COLUMNS, padded)
    filled[:num_columns, :depth] = weight
    return filled.view(groups, _COLUMNS, padded // inputs, inputs).transpose(1, 2).contiguous()
