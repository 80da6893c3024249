"""What lies between a layer's matrix products: rotary with the KV write, RMSNorm, SiLU. One pass over memory each.

Called by ``kernels``. Arithmetic is float32; what torch rounds to the model's dtype in between is rounded here too.
Integers that change from step to step are never specialised, so that nothing is compiled while serving.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.executor.kernels.interface import LayerCache, QkNorm, Rotary

_HEADS_PER_PROGRAM = 8
_COLUMNS_PER_PROGRAM = 1024


@triton.jit
def rotary_write_kernel(
    qkv,
    cos,
    sin,
    positions,
    slots,
    query_norm,
    key_norm,
    queries,
    keys,
    values,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """One token and HEADS of its heads. A slot below 0 belongs to nobody: nothing is written there."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, PADDED_HALF)
    real = (column < HALF)[None, :]
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_turned = is_query | is_key

    place = (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head)[:, None] * HEAD_DIM + column[None, :]
    exists = (is_turned | is_value)[:, None] & real
    raw_first = tl.load(qkv + place, mask=exists, other=0.0)
    raw_second = tl.load(qkv + place + HALF, mask=exists, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if NORM:
        mean = tl.sum(first * first + second * second, axis=1) / HEAD_DIM
        inverse = tl.rsqrt(mean + eps)[:, None]
        weights = tl.where(is_query[:, None], query_norm + column[None, :], key_norm + column[None, :])
        weighs = is_turned[:, None] & real
        first = first * inverse * tl.load(weights, mask=weighs, other=0.0).to(tl.float32)
        second = second * inverse * tl.load(weights + HALF, mask=weighs, other=0.0).to(tl.float32)
        first = first.to(qkv.dtype.element_ty).to(tl.float32)
        second = second.to(qkv.dtype.element_ty).to(tl.float32)
    turned_first, turned_second = first, second
    if TURN:
        turn = tl.load(positions + token).to(tl.int64) * HALF + column
        cosine = tl.load(cos + turn, mask=column < HALF, other=0.0)[None, :]
        sine = tl.load(sin + turn, mask=column < HALF, other=0.0)[None, :]
        turned_first = first * cosine - second * sine
        turned_second = second * cosine + first * sine
    turned_first = turned_first.to(qkv.dtype.element_ty)
    turned_second = turned_second.to(qkv.dtype.element_ty)

    query_place = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(queries + query_place, turned_first, mask=is_query[:, None] & real)
    tl.store(queries + query_place + HALF, turned_second, mask=is_query[:, None] & real)

    slot = tl.load(slots + token)
    is_kept = slot >= 0
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    key_head, value_head = head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS
    key_place = ((block * NUM_KV_HEADS + key_head) * BLOCK_SIZE + offset)[:, None] * HEAD_DIM + column[None, :]
    value_place = ((block * NUM_KV_HEADS + value_head) * BLOCK_SIZE + offset)[:, None] * HEAD_DIM + column[None, :]
    tl.store(keys + key_place, turned_first, mask=(is_key & is_kept)[:, None] & real)
    tl.store(keys + key_place + HALF, turned_second, mask=(is_key & is_kept)[:, None] & real)
    tl.store(values + value_place, raw_first, mask=(is_value & is_kept)[:, None] & real)
    tl.store(values + value_place + HALF, raw_second, mask=(is_value & is_kept)[:, None] & real)


@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, eps, COLUMNS: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr):
    """One row of ``COLUMNS``."""
    row = tl.program_id(0).to(tl.int64) * COLUMNS
    column = tl.arange(0, PADDED)
    real = column < COLUMNS
    summed = tl.load(x + row + column, mask=real, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(residual + row + column, mask=real, other=0.0).to(tl.float32)
        rounded = (before + summed).to(x.dtype.element_ty)
        tl.store(residual + row + column, rounded, mask=real)
        summed = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(summed * summed, axis=0) / COLUMNS + eps)
    normed = summed * inverse * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row + column, normed.to(x.dtype.element_ty), mask=real)


@triton.jit
def silu_mul_kernel(gate_up, out, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """``WIDTH`` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = column < COLUMNS
    gate = tl.load(gate_up + row * 2 * COLUMNS + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * COLUMNS + COLUMNS + column, mask=real, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * COLUMNS + column, result.to(gate_up.dtype.element_ty), mask=real)


def rotary_write(
    qkv_TXD: Tensor,
    num_heads: int,
    rotary: Rotary | None,
    norm: QkNorm | None,
    positions_T: Tensor,
    slots_T: Tensor,
    cache: LayerCache,
) -> Tensor:
    """See ``interface.StepAttention.rotate_and_write``. A token whose slot is below 0 is turned and not stored."""
    num_tokens, num_all_heads, head_dim = qkv_TXD.shape
    _, num_kv_heads, block_size, _ = cache.keys.shape
    assert num_all_heads == num_heads + 2 * num_kv_heads
    assert qkv_TXD.is_contiguous()
    assert rotary is None or (rotary.cos.is_contiguous() and rotary.sin.is_contiguous())
    queries_THD = qkv_TXD.new_empty(num_tokens, num_heads, head_dim)
    rotary_write_kernel[(num_tokens, triton.cdiv(num_all_heads, _HEADS_PER_PROGRAM))](
        qkv_TXD,
        rotary.cos if rotary else qkv_TXD,
        rotary.sin if rotary else qkv_TXD,
        positions_T,
        slots_T,
        norm.query_D if norm else qkv_TXD,
        norm.key_D if norm else qkv_TXD,
        queries_THD,
        cache.keys,
        cache.values,
        norm.eps if norm else 0.0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NORM=norm is not None,
        TURN=rotary is not None,
        HEADS=_HEADS_PER_PROGRAM,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
    )
    return queries_THD


def add_rms_norm(x_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float) -> Tensor:
    """See ``interface.Kernels.add_rms_norm``."""
    num_rows, columns = x_TC.shape
    assert x_TC.is_contiguous()
    assert residual_TC is None or residual_TC.is_contiguous()
    out_TC = torch.empty_like(x_TC)
    padded = triton.next_power_of_2(columns)
    add_rms_norm_kernel[(num_rows,)](
        x_TC,
        x_TC if residual_TC is None else residual_TC,
        weight_C,
        out_TC,
        eps,
        COLUMNS=columns,
        PADDED=padded,
        ADD=residual_TC is not None,
        num_warps=min(16, max(1, padded // 512)),
    )
    return out_TC


def silu_mul(gate_up_TC: Tensor) -> Tensor:
    """See ``interface.Kernels.silu_mul``."""
    num_rows, columns = gate_up_TC.shape[0], gate_up_TC.shape[1] // 2
    assert gate_up_TC.is_contiguous()
    out_TC = gate_up_TC.new_empty(num_rows, columns)
    grid = (num_rows, triton.cdiv(columns, _COLUMNS_PER_PROGRAM))
    silu_mul_kernel[grid](gate_up_TC, out_TC, COLUMNS=columns, WIDTH=_COLUMNS_PER_PROGRAM, num_warps=4)
    return out_TC
