"""int8 weights: one scale for each column out, chosen from that column alone; activations get one for each row.

Called by the kernels of this package. A row's product is a sum of integers times its own scale, so it is the same for
any number of rows, order and instruction set: the compiled product and the one here agree to the bit.

A few inputs of a row are often many times larger than the rest, and the scale that holds them leaves the others few
steps. So both sides are turned first, which leaves their product as it is: (x H)(W H)' = x W', as H is orthogonal.
Each run of 64 inputs is multiplied by a Hadamard matrix, which spreads a large one over all of them (as in QuaRot,
arXiv 2404.00456, but at each product, so that no model needs to be rewritten).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from services.executor.kernels.interface import Linear

LARGEST = 127
"""Largest magnitude of a quantized value; -128 is not used, so that scales are symmetric."""

ROTATED = 64
"""Inputs that are turned together; what is left over at the end stays as it is."""

_EXACT_DEPTH = 1024
"""float32 adds this many products of such values exactly, in any order (1024 * 127 * 127 < 2^24).

torch's own int8 product (``torch._int_mm``, 2.13) is not used: with one input column it gives wrong sums."""


class QuantizedWeight(NamedTuple):
    """Weights [columns, depth] as integers times one scale a column."""

    values_CK: Tensor
    """[C, K] int8, of the turned weights."""
    scales_C: Tensor
    """[C] float32."""


def rotate(x_RK: Tensor) -> Tensor:
    """Rows of float32 times the block-diagonal Hadamard matrix, in the order of additions that the C++ has."""
    num_rows, depth = x_RK.shape
    whole = depth // ROTATED * ROTATED
    turned = x_RK[:, :whole]
    distance = 1
    while distance < ROTATED:
        pairs = turned.reshape(num_rows, -1, 2, distance)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        turned = torch.stack((low + high, low - high), dim=2)
        distance *= 2
    return torch.cat((turned.reshape(num_rows, whole) * ROTATED**-0.5, x_RK[:, whole:]), dim=1)


def quantize(weight_CK: Tensor) -> QuantizedWeight:
    """The nearest integers after turning, and scaling each column's largest magnitude to 127."""
    wide = rotate(weight_CK.float())
    scales = wide.abs().amax(dim=1) / LARGEST
    values = (wide / torch.where(scales > 0, scales, 1.0)[:, None]).round_().to(torch.int8)
    return QuantizedWeight(values, scales)


def plain(weight: Tensor, bias: Tensor | None) -> Linear:
    """The product in plain torch, for machines without the compiled one."""
    values, scales = quantize(weight)
    parts = [part.float() for part in torch.split(values, _EXACT_DEPTH, dim=1)]
    wide_bias = None if bias is None else bias.float()

    def linear(x: Tensor) -> Tensor:
        wide = rotate(x.float())
        largest = wide.abs().amax(dim=1, keepdim=True)  # NaN and infinities stay, and spoil their own row alone
        finite = largest.isfinite()
        # not ``LARGEST / largest``: torch would round twice, the reciprocal first
        factors = torch.where((largest > 0) & finite, torch.full_like(largest, LARGEST).div_(largest), 0.0)
        rounded = (torch.where(finite, wide, 0.0) * torch.where(factors.isfinite(), factors, 0.0)).round_()
        pieces = torch.split(rounded, _EXACT_DEPTH, dim=1)
        sums = sum(
            (F.linear(piece, part).to(torch.int32) for piece, part in zip(pieces, parts, strict=True)),
            start=torch.zeros((), dtype=torch.int32),
        )
        row_scales = torch.where(factors.isfinite(), largest / LARGEST, 0.0)
        result = sums.float() * (scales * torch.where(finite, row_scales, float("nan")))
        return (result if wide_bias is None else result + wide_bias).to(x.dtype)

    return linear
