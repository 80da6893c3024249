"""All decoder layers in one call of the compiled library; see ``decoder.cpp``. Made by ``kernels``."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from services.executor.kernels.cpu.products import LaidOut, Product
from services.executor.kernels.cpu.step import CompiledAttention
from services.executor.kernels.interface import DecoderLayer, DecoderShape, LayerCache, StepAttention

PARTS = ("products", "attention", "rotary and KV write", "norms", "activation")
"""What a call's time is divided into, in the order of the C++."""

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, LaidOut) for name in ("qkv", "out", "gate_up", "down")),
        ("window", _N),
        ("qk_norm_eps", _F),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("layers", "cos", "sin")),
        *((name, _N) for name in ("num_layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "int8")),
        *((name, _F) for name in ("norm_eps", "scale")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("positions", "slots", "tables", "starts", "lens")),
        *((name, _P) for name in ("caches", "residual", "added", "ns")),
        *((name, _N) for name in ("rows", "sequences", "table_width", "block_size")),
    )


class CompiledDecoder:
    """See ``interface.Decoder``. Its layers' products must all be the library's own."""

    def __init__(
        self, function: Callable[..., Any], layers: Sequence[DecoderLayer], shape: DecoderShape, int8: bool
    ) -> None:
        self._function = function
        self._kept = layers, shape  # the pointers are valid as long as these live
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        first = layers[0]
        assert isinstance(first.down, Product)
        self._dtype = first.input_norm_C.dtype
        self._hidden = len(first.input_norm_C)
        self._decoder = _Decoder(
            ctypes.addressof(self._layers),
            *(turn.data_ptr() for turn in shape.rotary),
            *(len(layers), self._hidden, first.down.laid_out.depth),
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim, int8),
            *(shape.norm_eps, shape.head_dim**-0.5),
        )
        self._ns = (ctypes.c_int64 * len(PARTS))()

    def __call__(self, residual_TC: Tensor, attention: StepAttention, caches: Sequence[LayerCache]) -> Tensor:
        assert isinstance(attention, CompiledAttention)
        assert residual_TC.is_contiguous()
        assert residual_TC.dtype is caches[0].keys.dtype is self._dtype
        added = torch.empty_like(residual_TC)
        places = (ctypes.c_void_p * len(self._layers))(*(cache.keys.data_ptr() for cache in caches))
        step = _Step(
            *(column.data_ptr() for column in attention.columns),
            *(ctypes.addressof(places), residual_TC.data_ptr(), added.data_ptr(), ctypes.addressof(self._ns)),
            *(len(residual_TC), *attention.columns.tables.shape, caches[0].keys.shape[3]),
        )
        bfloat16 = self._dtype is torch.bfloat16
        self._function(ctypes.addressof(self._decoder), ctypes.addressof(step), bfloat16)
        return added

    def take_ns(self) -> dict[str, int]:
        """Nanoseconds of each part since this was last asked."""
        found = dict(zip(PARTS, self._ns, strict=True))
        ctypes.memset(self._ns, 0, ctypes.sizeof(self._ns))
        return found


def _layer(layer: DecoderLayer) -> _Layer:
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    norms = (layer.input_norm_C, *(layer.qk_norm[:2] if layer.qk_norm else (None, None)), layer.mlp_norm_C)
    return _Layer(
        *(None if norm is None else norm.data_ptr() for norm in norms),
        *(product.laid_out for product in products if isinstance(product, Product)),
        *(layer.window, layer.qk_norm.eps if layer.qk_norm else 0.0),
    )
