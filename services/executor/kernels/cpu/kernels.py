"""The compiled kernels as the model sees them; see ``interface``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels import linear
from services.executor.kernels.cpu.bindings import CpuLibrary, new_cache
from services.executor.kernels.cpu.decoder import CompiledDecoder
from services.executor.kernels.cpu.products import Product
from services.executor.kernels.cpu.step import CompiledAttention
from services.executor.kernels.decoder import ComposedDecoder
from services.executor.kernels.interface import (
    Decoder,
    DecoderLayer,
    DecoderShape,
    LayerCache,
    Linear,
    Quantization,
)


class CompiledKernels:
    """See ``interface.Kernels``. Raises build.NoCompilerError when the library cannot be had."""

    def __init__(self, quantization: Quantization = "none") -> None:
        self._library = CpuLibrary()
        self.quantization = quantization
        self.name = f"compiled {self._library.level} {self._library.digest}"

    def new_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> LayerCache:
        return LayerCache(*new_cache(num_blocks, num_kv_heads, block_size, head_dim, dtype))

    def step(self, batch: StepBatch, block_size: int) -> CompiledAttention:
        return CompiledAttention(self._library, batch)

    def linear(self, weight: Tensor, bias: Tensor | None, exact: bool = False) -> Linear:
        if self.quantization == "int8" and not exact:
            return self._library.int8_linear(weight, bias)
        if weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0 and self._library.has_bfloat16_product():
            return self._library.bfloat16_linear(weight, bias)
        return linear.packed(weight, bias) if linear.can_pack(weight) else linear.plain(weight, bias)

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float) -> Tensor:
        return self._library.add_rms_norm(x_TC, residual_TC, weight_C, eps)

    def silu_mul(self, gate_up_TC: Tensor) -> Tensor:
        return self._library.silu_mul(gate_up_TC)

    def decoder(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> Decoder:
        """In one piece where every product is the library's own."""
        products = [product for layer in layers for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        if all(isinstance(product, Product) for product in products):
            return CompiledDecoder(self._library.decode, layers, shape, int8=self.quantization == "int8")
        return ComposedDecoder(self, layers, shape)
