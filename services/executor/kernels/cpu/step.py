"""One step's columns as the compiled kernels read them. Made by ``kernels``, for every layer of the step."""

from typing import NamedTuple

import torch
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.cpu.bindings import CpuLibrary, PagedCache
from services.executor.kernels.interface import LayerCache, QkNorm, Rotary


class Columns(NamedTuple):
    """Views of a ``StepBatch``, contiguous; in the order of ``Step`` in decoder.cpp."""

    positions: Tensor
    slots: Tensor
    tables: Tensor
    starts: Tensor
    lens: Tensor


class CompiledAttention:
    """See ``interface.StepAttention``."""

    def __init__(self, library: CpuLibrary, batch: StepBatch) -> None:
        self._library = library
        parts = (batch.positions, batch.slot_mapping, batch.block_tables, batch.query_starts, batch.context_lens)
        self.columns = Columns(*(torch.from_numpy(part).contiguous() for part in parts))

    def rotate_and_write(
        self, qkv_TXD: Tensor, num_heads: int, rotary: Rotary | None, norm: QkNorm | None, cache: LayerCache
    ) -> Tensor:
        norms = (norm.query_D, norm.key_D, norm.eps) if norm else (None, None, 0.0)
        cos, sin = rotary or (None, None)
        columns = self.columns
        return self._library.rotary_write(
            qkv_TXD, cos, sin, columns.positions, columns.slots, PagedCache(*cache), num_heads, *norms
        )

    def attend(self, queries_THD: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
        columns = self.columns
        return self._library.paged_attention(
            queries_THD, PagedCache(*cache), columns.tables, columns.starts, columns.lens, scale, window
        )
