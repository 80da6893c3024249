"""Matrix products with weights that are laid out once.

oneDNN's product with prepacked weights is the faster one on CPUs, and from two rows up a row does not depend on how
many there are (in torch's own float32 product it does): so one row is padded to two, and a token's numbers are the same
alone and in a crowd. Used by the kernels of this package.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from services.executor.kernels.interface import Linear


def plain(weight: Tensor, bias: Tensor | None) -> Linear:
    """torch's own product."""
    return lambda x: F.linear(x, weight, bias)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes these weights on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def packed(weight: Tensor, bias: Tensor | None) -> Linear:
    """oneDNN's product, weights in its blocked layout."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    product = torch.ops.mkldnn._linear_pointwise

    def linear(x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            pair: Tensor = product(x.expand(2, -1).contiguous(), blocked, bias, "none", [], "")
            return pair[:1]
        result: Tensor = product(x, blocked, bias, "none", [], "")
        return result

    return linear
