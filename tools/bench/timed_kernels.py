"""Kernels that tell where a step's time goes: a layer between the model and the kernels it would have anyway.

Called by ``tools.bench.step``. Imports torch and the executor's kernels.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.cpu.decoder import PARTS, CompiledDecoder
from services.executor.kernels.decoder import ComposedDecoder
from services.executor.kernels.interface import (
    Decoder,
    DecoderLayer,
    DecoderShape,
    Kernels,
    LayerCache,
    Linear,
    QkNorm,
    Rotary,
    StepAttention,
)

PRODUCTS, ATTENTION, ROTARY, NORMS, ACTIVATION = PARTS
LAYOUT = "layout of the step"


class TimedKernels:
    """See ``interface.Kernels``. Counts time only while ``counting``: a clock costs as much as a small call."""

    def __init__(self, inner: Kernels) -> None:
        self._inner = inner
        self.name, self.quantization = inner.name, inner.quantization
        self.counting = False
        self.ns: Counter[str] = Counter()
        """Nanoseconds by part since the last ``reset``."""
        self.last_ns = 0
        """When the last part ended: what follows the last product is sampling."""
        self.shapes: list[tuple[int, int]] = []
        """[columns out, columns in] of every product of the model, in its order; the last is that of the logits."""

    def reset(self) -> None:
        """Forget what was counted."""
        self.ns.clear()

    def timed(self, part: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function``, counting its time to ``part``."""
        if not self.counting:
            return function(*arguments)
        began = time.perf_counter_ns()
        result = function(*arguments)
        self.last_ns = time.perf_counter_ns()
        self.ns[part] += self.last_ns - began
        return result

    def new_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> LayerCache:
        """Filled, not zeroed: zeros that nobody wrote take no memory and would be read from a cache."""
        cache = self._inner.new_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype)
        for part in cache:
            part.uniform_(-1, 1)
        return cache

    def step(self, batch: StepBatch, block_size: int) -> StepAttention:
        return _TimedAttention(self, self.timed(LAYOUT, self._inner.step, batch, block_size))

    def linear(self, weight: Tensor, bias: Tensor | None, exact: bool = False) -> Linear:
        self.shapes.append((weight.shape[0], weight.shape[1]))
        return _TimedLinear(self, self._inner.linear(weight, bias, exact))

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float) -> Tensor:
        result: Tensor = self.timed(NORMS, self._inner.add_rms_norm, x_TC, residual_TC, weight_C, eps)
        return result

    def silu_mul(self, gate_up_TC: Tensor) -> Tensor:
        result: Tensor = self.timed(ACTIVATION, self._inner.silu_mul, gate_up_TC)
        return result

    def decoder(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> Decoder:
        """One that tells its parts' time by itself, or one that calls the operations here."""
        decoder = self._inner.decoder([_untimed(layer) for layer in layers], shape)
        if isinstance(decoder, CompiledDecoder):
            return _TimedDecoder(self, decoder)
        return ComposedDecoder(self, layers, shape)


class _TimedLinear:
    """See ``interface.Linear``."""

    def __init__(self, kernels: TimedKernels, inner: Linear) -> None:
        self._kernels, self.inner = kernels, inner

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._kernels.timed(PRODUCTS, self.inner, x)
        return result


def _untimed(layer: DecoderLayer) -> DecoderLayer:
    def inner(linear: Linear) -> Linear:
        return linear.inner if isinstance(linear, _TimedLinear) else linear

    return layer._replace(
        qkv=inner(layer.qkv), out=inner(layer.out), gate_up=inner(layer.gate_up), down=inner(layer.down)
    )


class _TimedDecoder:
    """See ``interface.Decoder``."""

    def __init__(self, kernels: TimedKernels, inner: CompiledDecoder) -> None:
        self._kernels, self._inner = kernels, inner

    def __call__(self, residual_TC: Tensor, attention: StepAttention, caches: Sequence[LayerCache]) -> Tensor:
        assert isinstance(attention, _TimedAttention)
        self._inner.take_ns()
        added = self._inner(residual_TC, attention.inner, caches)
        if self._kernels.counting:
            self._kernels.ns.update(self._inner.take_ns())
        return added


class _TimedAttention:
    """See ``interface.StepAttention``."""

    def __init__(self, kernels: TimedKernels, inner: StepAttention) -> None:
        self._kernels, self.inner = kernels, inner

    def rotate_and_write(
        self, qkv_TXD: Tensor, num_heads: int, rotary: Rotary | None, norm: QkNorm | None, cache: LayerCache
    ) -> Tensor:
        function = self.inner.rotate_and_write
        result: Tensor = self._kernels.timed(ROTARY, function, qkv_TXD, num_heads, rotary, norm, cache)
        return result

    def attend(self, queries_THD: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
        result: Tensor = self._kernels.timed(ATTENTION, self.inner.attend, queries_THD, cache, scale, window)
        return result
