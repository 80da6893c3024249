"""A step's columns of integers on their way to the device: one copy, from pinned memory, that nobody waits for."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; kernels are compiled for pointers that are at least this aligned."""
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}

Column = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32]


def upload(columns: Sequence[Column], device: torch.device) -> list[Tensor]:
    """Each of ``columns`` as a tensor on ``device``, of the same shape and dtype.

    The pinned memory comes from torch's cache, which gives it out again only once the copy has been made.
    """
    offsets = np.cumsum([0, *(-(-column.nbytes // _ALIGNMENT) * _ALIGNMENT for column in columns)]).tolist()
    staged = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    bytes_ = staged.numpy()
    for column, offset in zip(columns, offsets, strict=False):
        bytes_[offset : offset + column.nbytes] = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
    moved = staged.to(device, non_blocking=True)
    return [
        moved[offset : offset + column.nbytes].view(_DTYPES[column.dtype]).view(column.shape)
        for column, offset in zip(columns, offsets, strict=False)
    ]
