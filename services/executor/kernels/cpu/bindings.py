"""The compiled kernels as Python functions over torch tensors.

Every tensor must be contiguous and of one dtype, float32 or bfloat16; the functions assert it, since a wrong pointer
would read or write at random. Shapes use T rows of a step, R sequences, H heads, K kv heads, D head_dim, B block size.
"""

import ctypes
import hashlib
from pathlib import Path
from typing import NamedTuple

import torch

from services.executor.kernels.cpu import build
from services.executor.kernels.cpu.products import Product, bfloat16_product, int8_product

_LARGEST_HEAD_DIM = 256

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "paged_attention": [_P, _P, _P, _P, _N, _P, _P, _I, _I, _I, _I, _I, _I, _F, _I],
    "add_rms_norm": [_P, _P, _P, _P, _N, _N, _F, _I],
    "rotary_write": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _F, _I],
    "silu_mul": [_P, _P, _N, _N, _I],
    "has_bfloat16_product": [],
    "bfloat16_product": [_P, _P, _P, _N],
    "int8_product": [_P, _P, _P, _N, _I],
    "decode": [_P, _P, _I],
}
"""Of every function of the library: told once, so that a call makes no objects of its own."""


def _pointer(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    assert tensor.is_cpu
    return tensor.data_ptr()


def supports(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether the compiled kernels serve a model of this shape (the reference serves every other)."""
    whole_vectors = head_dim % 16 == 0 and block_size % 16 == 0
    return whole_vectors and head_dim <= _LARGEST_HEAD_DIM and dtype in (torch.float32, torch.bfloat16)


def padded_head_dim(head_dim: int) -> int:
    """The smallest head size for the compiled kernels that is not below ``head_dim``; itself when there is none."""
    padded = -(-head_dim // 16) * 16
    return padded if padded <= _LARGEST_HEAD_DIM else head_dim


class PagedCache(NamedTuple):
    """Keys and values of one layer; ``P`` neighbouring values lie in a pack of 32 bits: one float32, two bfloat16.

    Views of one memory [blocks, K, 2, B * D], which starts where the keys do.
    """

    keys: torch.Tensor
    """[blocks, K, D / P, B, P]"""
    values: torch.Tensor
    """[blocks, K, B / P, D, P]"""


def new_cache(num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> PagedCache:
    """Zeros."""
    pack = 4 // dtype.itemsize
    keys, values = torch.zeros(num_blocks, kv_heads, 2, block_size * head_dim, dtype=dtype).unbind(2)
    return PagedCache(
        keys.view(num_blocks, kv_heads, head_dim // pack, block_size, pack),
        values.view(num_blocks, kv_heads, block_size // pack, head_dim, pack),
    )


class CpuLibrary:
    """The library of one instruction set level. Raises build.NoCompilerError when it cannot be had."""

    def __init__(self, path: Path | None = None) -> None:
        """Loads ``path``, or this machine's own library, compiled now where need be."""
        self.level = build.level()
        path = path or build.shared_object(self.level)
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        """Changes whenever the kernels or what compiled them do, and so may their numbers."""
        self._library = ctypes.CDLL(str(path))
        for name, types in _SIGNATURES.items():
            getattr(self._library, name).argtypes = types
        self.decode = self._library.decode
        """For ``decoder``, which lays out its arguments."""

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: PagedCache,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        window: int = 0,
    ) -> torch.Tensor:
        """Causal attention of each sequence's rows over its context; prefill chunks and decodes in one call.

        query [T, H, D]; block_tables int32 [R, width]; query_starts int32 [R + 1]; context_lens int32 [R], the rows
        of the step included. ``window`` positions back are seen (0: all). Returns [T, H, D].
        """
        assert block_tables.dtype == query_starts.dtype == context_lens.dtype == torch.int32
        assert query.dtype == cache.keys.dtype
        assert scale > 0
        out = torch.empty_like(query)
        failed = self._library.paged_attention(
            *(_pointer(query), cache.keys.data_ptr(), _pointer(out), _pointer(block_tables)),
            block_tables.shape[1],
            *map(_pointer, (query_starts, context_lens)),
            *(len(context_lens), query.shape[1], cache.keys.shape[1], query.shape[2], cache.keys.shape[3], window),
            *(scale, query.dtype is torch.bfloat16),
        )
        assert not failed, f"head_dim {query.shape[2]} is not compiled"
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """RMSNorm of x [T, width], or of ``residual += x`` (in place) when there is a residual. Returns [T, width]."""
        assert x.dtype == weight.dtype
        out = torch.empty_like(x)
        self._library.add_rms_norm(*map(_pointer, (x, residual, weight, out)), *x.shape, eps, x.dtype is torch.bfloat16)
        return out

    def rotary_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: PagedCache,
        heads: int,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Turn queries and keys by their positions (unless they bring none), and write keys and values in their slots.

        qkv [T, (H + 2 K) * D]; cos, sin float32 [positions, D / 2]; positions int32 [T]; slots int64 [T]; the
        norms, [D] each, are applied per head before turning.
        Returns the queries [T, H, D].
        """
        assert positions.dtype == torch.int32
        assert slots.dtype == torch.int64
        assert (cos is None) == (sin is None)
        assert cos is None or sin is None or cos.dtype == sin.dtype == torch.float32
        assert qkv.dtype == cache.keys.dtype
        _, kv_heads, _, block_size, _ = cache.keys.shape
        head_dim = cache.values.shape[3]
        query = qkv.new_empty(len(qkv), heads, head_dim)
        self._library.rotary_write(
            *map(_pointer, (qkv, cos, sin, positions, slots, query_norm, key_norm, query)),
            cache.keys.data_ptr(),
            *(len(qkv), heads, kv_heads, head_dim, block_size, eps, qkv.dtype is torch.bfloat16),
        )
        return query

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of gate_up [T, 2 * width], gate first. Returns [T, width]."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._library.silu_mul(_pointer(gate_up), _pointer(out), *out.shape, gate_up.dtype is torch.bfloat16)
        return out

    def has_bfloat16_product(self) -> bool:
        """Whether this machine's dot product takes bfloat16 pairs."""
        return bool(self._library.has_bfloat16_product())

    def bfloat16_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """A product with bfloat16 ``weight`` [columns, depth], where there is one and depth is even."""
        assert self.has_bfloat16_product()
        return bfloat16_product(self._library.bfloat16_product, weight, bias)

    def int8_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """A product with ``weight`` [columns, depth] as int8; rows are quantized one by one. See ``int8``."""
        return int8_product(self._library.int8_product, weight, bias)
