"""Decoder layers from the operations of the kernels, one after another. Made by every kind of kernels."""

from collections.abc import Sequence

from torch import Tensor

from services.executor.kernels.interface import DecoderLayer, DecoderShape, Kernels, LayerCache, StepAttention


class ComposedDecoder:
    """See ``interface.Decoder``. Waits for nothing on the device, so that CUDA can capture it."""

    def __init__(self, kernels: Kernels, layers: Sequence[DecoderLayer], shape: DecoderShape) -> None:
        self._kernels, self._layers, self._shape = kernels, layers, shape

    def __call__(self, residual_TC: Tensor, attention: StepAttention, caches: Sequence[LayerCache]) -> Tensor:
        kernels, eps = self._kernels, self._shape.norm_eps
        added: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            if added is None:  # nothing to add yet
                normed = kernels.add_rms_norm(residual_TC, None, layer.input_norm_C, eps)
            else:
                normed = kernels.add_rms_norm(added, residual_TC, layer.input_norm_C, eps)
            added = layer.out(self._attend(layer, layer.qkv(normed), attention, cache))
            normed = kernels.add_rms_norm(added, residual_TC, layer.mlp_norm_C, eps)
            added = layer.down(kernels.silu_mul(layer.gate_up(normed)))
        assert added is not None
        return added

    def _attend(self, layer: DecoderLayer, qkv: Tensor, attention: StepAttention, cache: LayerCache) -> Tensor:
        shape = self._shape
        heads = qkv.view(len(qkv), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        queries = attention.rotate_and_write(heads, shape.num_heads, shape.rotary, layer.qk_norm, cache)
        found = attention.attend(queries, cache, shape.head_dim**-0.5, layer.window)
        return found.view(len(qkv), shape.num_heads * shape.head_dim)
