"""The Triton kernels as the model sees them; see ``interface``. Imports triton: only where a CUDA device serves."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.decoder import ComposedDecoder
from services.executor.kernels.interface import (
    DecoderLayer,
    DecoderShape,
    LayerCache,
    Linear,
    QkNorm,
    Quantization,
    Rotary,
)
from services.executor.kernels.triton import elementwise, tiles
from services.executor.kernels.triton.attention import attend
from services.executor.kernels.triton.product import product
from services.executor.kernels.triton.tiles import Tiles
from services.executor.kernels.upload import upload

_PROGRAMS_PER_PROCESSOR = 4
"""Split tiles are shared out until every multiprocessor has about this many programs."""


class StepColumns(NamedTuple):
    """What attention reads of a step, on the device; all int32 but the slots. Rows and tokens as in ``StepBatch``."""

    positions: Tensor
    """[T]"""
    slots: Tensor
    """[T] int64; below 0 for a token that is stored nowhere."""
    query_starts: Tensor
    """[R + 1]"""
    context_lens: Tensor
    """[R]; 0 for a row that stands for nothing: its results are 0."""
    tables: Tensor
    """[R, W]"""


class TritonAttention:
    """One step's attention; see ``interface.StepAttention``."""

    def __init__(self, columns: StepColumns, tiles_of: Callable[[int], Tiles], num_processors: int) -> None:
        """``tiles_of`` shares the work out, given how many query heads share a KV head."""
        self._columns, self._tiles_of, self._num_processors = columns, tiles_of, num_processors

    def rotate_and_write(
        self, qkv_TXD: Tensor, num_heads: int, rotary: Rotary | None, norm: QkNorm | None, cache: LayerCache
    ) -> Tensor:
        columns = self._columns
        return elementwise.rotary_write(qkv_TXD, num_heads, rotary, norm, columns.positions, columns.slots, cache)

    def attend(self, queries_THD: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
        columns, num_kv_heads = self._columns, cache.keys.shape[1]
        shared = self._tiles_of(queries_THD.shape[1] // num_kv_heads)
        wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * self._num_processors, len(shared.tiles) * num_kv_heads)
        num_parts = min(wanted, shared.max_segments) if len(shared.split_tokens) else 1
        rows = columns.tables, columns.query_starts, columns.context_lens
        return attend(queries_THD, cache, *rows, shared, num_parts, scale, window)


class TritonKernels:
    """See ``interface.Kernels``. The cache is [blocks, K, block size, D]: a head's block is one piece of memory."""

    name = f"triton {triton.__version__}"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.quantization: Quantization = "none"
        self.num_processors = 1
        if device.type == "cuda":
            self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def new_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> LayerCache:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        return LayerCache(*(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2)))

    def step(self, batch: StepBatch, block_size: int) -> TritonAttention:
        columns = upload(
            (batch.positions, batch.slot_mapping, batch.query_starts, batch.context_lens, batch.block_tables),
            self.device,
        )

        def tiles_of(group: int) -> Tiles:
            plan = tiles.plan(batch, group)
            shared, tokens, ends = upload((plan.tiles, plan.split_tokens, plan.split_ends), self.device)
            return Tiles(shared, tokens, ends, plan.max_segments)

        return TritonAttention(StepColumns(*columns), cache(tiles_of), self.num_processors)

    def linear(self, weight: Tensor, bias: Tensor | None, exact: bool = False) -> Linear:
        return product(weight, bias)

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float) -> Tensor:
        return elementwise.add_rms_norm(x_TC, residual_TC, weight_C, eps)

    def silu_mul(self, gate_up_TC: Tensor) -> Tensor:
        return elementwise.silu_mul(gate_up_TC)

    def decoder(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> ComposedDecoder:
        return ComposedDecoder(self, layers, shape)
