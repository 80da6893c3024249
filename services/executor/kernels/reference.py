"""The kernels in plain torch: right on every device, and what the others are checked against.

A layer's cache here is two tensors [num_blocks, block_size, K, D].

Attention gathers the contexts of rows of about equal size into one padded batch and calls torch's fused attention once
per such group and layer; nothing loops over rows or tokens in Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels import int8, linear
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

_MAX_GATHERED = 1 << 15
"""Most context slots that one group copies out of the cache (memory: this times the KV bytes of a token and layer)."""
_MAX_SCORES = 1 << 22
"""Most (query, context slot) pairs of one group of several rows; its mask has as many entries per head of a KV head."""


@dataclass
class _Group:
    """Rows that attend in one padded call: B rows, N queries and L context slots at most each."""

    tokens_BN: Tensor
    """Index of each query among the step's tokens; a row with fewer queries repeats its last one."""
    valid: Tensor | None
    """[B * N] which of those are real; None when all are."""
    slots: Tensor
    """[B * L] the context's slots; past a row's context its own first slot, so that no foreign slot is ever read."""
    key_positions_L: Tensor
    query_positions_BN: Tensor
    gathered: dict[int, Tensor] = field(default_factory=dict)
    """Where contexts are copied to: the same memory for every layer, since fresh memory costs more than the copy."""
    masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)
    """Additive masks by (queries per KV head, window, dtype): the same for every layer that asks alike."""

    def gather(self, index: int, part: Tensor) -> Tensor:
        """[B * L, K, D] of the keys (``index`` 0) or values (1) of one layer."""
        if index not in self.gathered:
            self.gathered[index] = part.new_empty((len(self.slots), *part.shape[2:]))
        return torch.index_select(part.flatten(0, 1), 0, self.slots, out=self.gathered[index])

    def mask(self, heads_per_kv: int, window: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, N * heads_per_kv, L], 0 where a query may look and -inf elsewhere ([B, 1, 1, L] for one query)."""
        key = (heads_per_kv, window, dtype)
        if key not in self.masks:
            queries = self.query_positions_BN[:, :, None]
            seen = self.key_positions_L <= queries
            if window:
                seen &= self.key_positions_L > queries - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            num_rows, num_queries, num_keys = mask.shape
            if num_queries > 1:
                mask = mask[:, :, None].expand(-1, -1, heads_per_kv, -1).reshape(num_rows, -1, num_keys)
            self.masks[key] = mask[:, None]
        return self.masks[key]


class _ReferenceAttention:
    """One step's attention; see ``interface.StepAttention``."""

    def __init__(self, batch: StepBatch, block_size: int, device: torch.device) -> None:
        self._slots = torch.as_tensor(batch.slot_mapping, device=device)
        self._positions = torch.as_tensor(batch.positions, device=device)
        self._turns: tuple[Tensor, Tensor] | None = None
        """Cosine and sine of each token's position: the same for every layer."""
        self._groups = [_group(batch, rows, block_size, device) for rows in _grouped(batch)]

    def rotate_and_write(
        self, qkv_TXD: Tensor, num_heads: int, rotary: Rotary | None, norm: QkNorm | None, cache: LayerCache
    ) -> Tensor:
        num_kv_heads = (qkv_TXD.shape[1] - num_heads) // 2
        turning = qkv_TXD[:, : num_heads + num_kv_heads]
        if norm is not None:
            queries = F.rms_norm(turning[:, :num_heads], norm.query_D.shape, norm.query_D, norm.eps)
            keys = F.rms_norm(turning[:, num_heads:], norm.key_D.shape, norm.key_D, norm.eps)
            turning = torch.cat((queries, keys), dim=1)
        turned = turning if rotary is None else self._turned(turning, rotary).to(qkv_TXD.dtype)
        cache.keys.flatten(0, 1).index_copy_(0, self._slots, turned[:, num_heads:])
        cache.values.flatten(0, 1).index_copy_(0, self._slots, qkv_TXD[:, num_heads + num_kv_heads :])
        return turned[:, :num_heads]

    def _turned(self, heads_TXD: Tensor, rotary: Rotary) -> Tensor:
        if self._turns is None:
            self._turns = rotary.cos[self._positions, None], rotary.sin[self._positions, None]
        cos, sin = self._turns
        first, second = heads_TXD.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def attend(self, queries_THD: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
        if len(self._groups) == 1 and self._groups[0].valid is None:  # the group is the step, in its order
            return _attend(self._groups[0], queries_THD, cache, scale, window)
        out_THD = torch.empty_like(queries_THD, memory_format=torch.contiguous_format)
        for group in self._groups:
            tokens = group.tokens_BN.flatten()
            found = _attend(group, queries_THD[tokens], cache, scale, window)
            if group.valid is not None:
                found, tokens = found[group.valid], tokens[group.valid]
            out_THD.index_copy_(0, tokens, found)
        return out_THD


def _attend(group: _Group, queries: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
    """The group's ``queries`` and the result are [B * N, H, D].

    The query heads that share a KV head count as further queries of it, so KV is never repeated.
    """
    num_rows, num_queries = group.tokens_BN.shape
    num_kv_heads, head_dim = cache.keys.shape[2:]
    heads_per_kv = queries.shape[1] // num_kv_heads
    queries = queries.view(num_rows, num_queries, num_kv_heads, heads_per_kv, head_dim)
    keys, values = (
        group.gather(index, part).view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2)
        for index, part in enumerate(cache)
    )
    found = F.scaled_dot_product_attention(
        queries.transpose(1, 2).reshape(num_rows, num_kv_heads, num_queries * heads_per_kv, head_dim),
        keys,
        values,
        attn_mask=group.mask(heads_per_kv, window, queries.dtype),
        scale=scale,
    )
    found = found.view(num_rows, num_kv_heads, num_queries, heads_per_kv, head_dim).transpose(1, 2)
    return found.reshape(num_rows * num_queries, -1, head_dim)


def _grouped(batch: StepBatch) -> list[NDArray[np.int64]]:
    """Rows in groups within which neither queries nor contexts differ by more than a factor of two."""
    counts = np.diff(batch.query_starts).astype(np.int64)
    contexts = batch.context_lens.astype(np.int64)
    size_classes = np.ceil(np.log2(counts)) * 64 + np.ceil(np.log2(contexts))
    groups = []
    for size_class in np.unique(size_classes):
        rows = np.flatnonzero(size_classes == size_class)
        longest = int(contexts[rows].max())
        per_call = max(1, min(_MAX_GATHERED // longest, _MAX_SCORES // (longest * int(counts[rows].max()))))
        groups += [rows[start : start + per_call] for start in range(0, len(rows), per_call)]
    return groups


def _group(batch: StepBatch, rows: NDArray[np.int64], block_size: int, device: torch.device) -> _Group:
    starts = batch.query_starts[rows].astype(np.int64)[:, None]
    counts = batch.query_starts[rows + 1].astype(np.int64)[:, None] - starts
    offsets = np.arange(counts.max())
    tokens = starts + np.minimum(offsets, counts - 1)
    real = offsets < counts

    contexts = batch.context_lens[rows].astype(np.int64)[:, None]
    positions = np.arange(contexts.max())
    inside = np.where(positions < contexts, positions, 0)
    blocks = np.take_along_axis(batch.block_tables[rows].astype(np.int64), inside // block_size, axis=1)
    slots = blocks * block_size + inside % block_size
    return _Group(
        tokens_BN=torch.as_tensor(tokens, device=device),
        valid=None if real.all() else torch.as_tensor(real.ravel(), device=device),
        slots=torch.as_tensor(slots.ravel(), device=device),
        key_positions_L=torch.as_tensor(positions, device=device),
        query_positions_BN=torch.as_tensor(batch.positions.astype(np.int64)[tokens], device=device),
    )


class ReferenceKernels:
    """See ``interface.Kernels``."""

    name = "reference"

    def __init__(self, device: torch.device, quantization: Quantization = "none") -> None:
        self._device, self.quantization = device, quantization

    def new_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> LayerCache:
        keys, values = torch.zeros(2, num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, device=self._device)
        return LayerCache(keys, values)

    def step(self, batch: StepBatch, block_size: int) -> _ReferenceAttention:
        return _ReferenceAttention(batch, block_size, self._device)

    def linear(self, weight: Tensor, bias: Tensor | None, exact: bool = False) -> Linear:
        if self.quantization == "int8" and not exact:
            return int8.plain(weight, bias)
        return linear.packed(weight, bias) if linear.can_pack(weight) else linear.plain(weight, bias)

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float) -> Tensor:
        summed = x_TC if residual_TC is None else residual_TC.add_(x_TC)
        return F.rms_norm(summed, weight_C.shape, weight_C, eps)

    def silu_mul(self, gate_up_TC: Tensor) -> Tensor:
        gate, up = gate_up_TC.chunk(2, dim=-1)
        return F.silu(gate) * up

    def decoder(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> ComposedDecoder:
        return ComposedDecoder(self, layers, shape)
