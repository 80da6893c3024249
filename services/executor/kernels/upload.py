"""A step's columns of numbers on their way to the device: one copy, from pinned memory, that nobody waits for.

Called by the model, the kernels and sampling. ``torch.as_tensor`` would stop the host until the device has done all it
was given.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; kernels are compiled for pointers that are at least this aligned."""
_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def upload(columns: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Each of ``columns`` as a tensor on ``device``, of the same shape and dtype, which is one of ``_DTYPES``.

    The pinned memory comes from torch's cache, which gives it out again only once the copy has been made.
    """
    ends = np.cumsum([0, *(-(-column.nbytes // _ALIGNMENT) * _ALIGNMENT for column in columns)]).tolist()
    places = [slice(start, start + column.nbytes) for start, column in zip(ends, columns, strict=False)]
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    filled = staged.numpy()
    for column, place in zip(columns, places, strict=True):
        filled[place] = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
    moved = staged.to(device, non_blocking=True)
    return [
        moved[place].view(_DTYPES[column.dtype]).view(column.shape)
        for column, place in zip(columns, places, strict=True)
    ]
