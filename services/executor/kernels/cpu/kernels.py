"""The compiled kernels as the model sees them; see ``interface``."""

import torch
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels import linear
from services.executor.kernels.cpu.bindings import CpuLibrary
from services.executor.kernels.interface import LayerCache, Linear, QkNorm, Quantization, Rotary


class _CompiledAttention:
    """One step's attention; see ``interface.StepAttention``."""

    def __init__(self, library: CpuLibrary, batch: StepBatch) -> None:
        self._library = library
        self._positions = torch.from_numpy(batch.positions)
        self._slots = torch.from_numpy(batch.slot_mapping)
        self._tables = torch.from_numpy(batch.block_tables)
        self._starts = torch.from_numpy(batch.query_starts)
        self._lens = torch.from_numpy(batch.context_lens)

    def rotate_and_write(
        self, qkv_TXD: Tensor, num_heads: int, rotary: Rotary | None, norm: QkNorm | None, cache: LayerCache
    ) -> Tensor:
        norms = (norm.query_D, norm.key_D, norm.eps) if norm else (None, None, 0.0)
        cos, sin = rotary or (None, None)
        return self._library.rotary_write(qkv_TXD, cos, sin, self._positions, self._slots, *cache, num_heads, *norms)

    def attend(self, queries_THD: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
        return self._library.paged_attention(queries_THD, *cache, self._tables, self._starts, self._lens, scale, window)


class CompiledKernels:
    """See ``interface.Kernels``. Raises build.NoCompilerError when the library cannot be had."""

    def __init__(self, quantization: Quantization = "none") -> None:
        self._library = CpuLibrary()
        self.quantization = quantization
        self.name = f"compiled {self._library.level}"

    def new_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> LayerCache:
        """Keys lie transposed in their block, so that one vector holds neighbouring positions."""
        return LayerCache(
            torch.zeros(num_blocks, num_kv_heads, head_dim, block_size, dtype=dtype),
            torch.zeros(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype),
        )

    def step(self, batch: StepBatch, block_size: int) -> _CompiledAttention:
        return _CompiledAttention(self._library, batch)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self.quantization == "int8":
            return self._library.int8_linear(weight, bias)
        if weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0 and self._library.has_bfloat16_product():
            return self._library.bfloat16_linear(weight, bias)
        return linear.packed(weight, bias) if linear.can_pack(weight) else linear.plain(weight, bias)

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float) -> Tensor:
        return self._library.add_rms_norm(x_TC, residual_TC, weight_C, eps)

    def silu_mul(self, gate_up_TC: Tensor) -> Tensor:
        return self._library.silu_mul(gate_up_TC)
