"""Paged attention: one kernel for prefill chunks and decodes, and one that puts a split row together.

Called by ``kernels``. Positions are cut into segments of ``SEGMENT``, counted from position 0. A segment is reduced in
tiles of a fixed size; segments are then folded in order, by ``_fold`` alone. Either one program does all segments of
its queries (prefill), or many programs do one each and a second kernel folds them (decode, for the sake of a device
that has more multiprocessors than the step has rows). Both are the same compiled program with the same tiles, so the
bits are the same: neither the batch, nor the chunk cut, nor the number of programs moves a result. A masked position
weighs exactly 0, and a wholly masked tile or segment changes nothing.

Multiplications and additions are not fused (``enable_fp_fusion``): a compiler free to fuse may fuse the two kernels
differently. Segments and online softmax: FlashDecoding (Dao et al. 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.executor.kernels.interface import LayerCache
from services.executor.kernels.triton.tiles import SEGMENT, Tiles, tile_pairs

_TILE_BYTES = 16384
"""Of the keys, and of the values, that a program reads at once: two of each must fit the shared memory."""
_HEADS_PER_FOLD = 4
_LOG2_E = 1.4426950408889634


@triton.jit
def _fold(peak, total, found, next_peak, next_total, next_found):
    """Softmax statistics and weighted values of two runs of positions together. Exact where either run saw nothing."""
    top = tl.maximum(peak, next_peak)
    base = tl.where(top == float("-inf"), 0.0, top)
    before, after = tl.exp2(peak - base), tl.exp2(next_peak - base)
    return (
        top,
        total * before + next_total * after,
        found * before[:, None] + next_found * after[:, None],
    )


@triton.jit
def _divided(found, total):
    """Weighted values over the sum of weights; 0 for a pair that saw nothing; NaN stays NaN."""
    return found / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["table_width", "max_segments", "window"])
def attend_kernel(
    queries,
    keys,
    values,
    out,
    peaks,
    totals,
    founds,
    tiles,
    tables,
    query_starts,
    context_lens,
    table_width,
    max_segments,
    window,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEGMENT: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Program (tile, kv head, part): the queries of a tile over segments ``part``, ``part + parts``, ...

    tiles int32 [tiles, 3]: row, its first query here, and where its results lie in the scratch memory (peaks, totals
    [split tokens, heads, max_segments], founds [.., HEAD_DIM]), or -1 when part 0 does all segments and stores to out.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERIES: tl.constexpr = PAIRS // GROUP
    tile = tiles + tl.program_id(0) * 3
    kv_head = tl.program_id(1)
    part, parts = tl.program_id(2), tl.num_programs(2)
    row, first_query, scratch = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    is_split = scratch >= 0
    start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - start
    context = tl.load(context_lens + row)
    table = tables + row.to(tl.int64) * table_width

    pair = tl.arange(0, PAIRS)
    query, head = first_query + pair // GROUP, kv_head * GROUP + pair % GROUP
    is_pair = (pair < QUERIES * GROUP) & (query < count)
    position = tl.where(is_pair, context - count + query, -1)
    oldest = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    end = context - count + tl.minimum(first_query + QUERIES, count)
    first = tl.where(window > 0, tl.maximum(context - count + first_query - window + 1, 0), 0)

    column = tl.arange(0, PADDED_DIM)
    is_column = column < HEAD_DIM
    place = ((start + query).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    is_place = is_pair[:, None] & is_column[None, :]
    asked = tl.load(queries + place, mask=is_place, other=0.0)
    scratch_row = ((scratch + pair // GROUP).to(tl.int64) * NUM_HEADS + head) * max_segments

    all_peak = tl.full([PAIRS], float("-inf"), dtype=tl.float32)
    all_total = tl.zeros([PAIRS], dtype=tl.float32)
    all_found = tl.zeros([PAIRS, PADDED_DIM], dtype=tl.float32)
    step = tl.where(is_split, parts, 1)
    begin = first // SEGMENT + part
    stop = tl.where(is_split | (part == 0), tl.cdiv(end, SEGMENT), begin)
    for segment in range(begin, stop, step):
        peak = tl.full([PAIRS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([PAIRS], dtype=tl.float32)
        found = tl.zeros([PAIRS, PADDED_DIM], dtype=tl.float32)
        low = tl.maximum(segment * SEGMENT, first // TILE * TILE)
        high = tl.minimum((segment + 1) * SEGMENT, end)
        for at in range(low, high, TILE):
            key_position = at + tl.arange(0, TILE)
            is_inside = key_position < end
            block = tl.load(table + key_position // BLOCK_SIZE, mask=is_inside, other=0).to(tl.int64)
            slot = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key_position % BLOCK_SIZE
            kv_place = slot[:, None] * HEAD_DIM + column[None, :]
            is_kv = is_inside[:, None] & is_column[None, :]
            key = tl.load(keys + kv_place, mask=is_kv, other=0.0)
            scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
            is_seen = (key_position[None, :] <= position[:, None]) & (key_position[None, :] >= oldest[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
            top = tl.maximum(peak, tl.max(scores, axis=1))
            base = tl.where(top == float("-inf"), 0.0, top)
            weights = tl.exp2(scores - base[:, None])
            before = tl.exp2(peak - base)
            total = total * before + tl.sum(weights, axis=1)
            value = tl.load(values + kv_place, mask=is_kv, other=0.0)
            weighted = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            found = found * before[:, None] + weighted
            peak = top
        if is_split:
            tl.store(peaks + scratch_row + segment, peak, mask=is_pair)
            tl.store(totals + scratch_row + segment, total, mask=is_pair)
            scratch_place = (scratch_row + segment)[:, None] * HEAD_DIM + column[None, :]
            tl.store(founds + scratch_place, found, mask=is_place)
        all_peak, all_total, all_found = _fold(all_peak, all_total, all_found, peak, total, found)
    is_done = is_place & (scratch < 0) & (part == 0)
    tl.store(out + place, _divided(all_found, all_total).to(out.dtype.element_ty), mask=is_done)


@triton.jit(do_not_specialize=["max_segments", "window"])
def fold_kernel(
    peaks,
    totals,
    founds,
    out,
    split_tokens,
    split_ends,
    max_segments,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENT: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Program (split token, HEADS of its heads): fold its segments in order and store to ``out``.

    A token sees positions below its end; one that stands for nothing has an end of 0, and gets zeros.
    """
    token = tl.load(split_tokens + tl.program_id(0)).to(tl.int64)
    end = tl.load(split_ends + tl.program_id(0))
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, PADDED_DIM)
    is_place = (head < NUM_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    scratch_row = (tl.program_id(0).to(tl.int64) * NUM_HEADS + head) * max_segments
    peak = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    found = tl.zeros([HEADS, PADDED_DIM], dtype=tl.float32)
    first = tl.where(window > 0, tl.maximum(end - window, 0), 0)
    for segment in range(first // SEGMENT, tl.cdiv(end, SEGMENT)):
        at = scratch_row + segment
        next_peak = tl.load(peaks + at, mask=head < NUM_HEADS, other=0.0)
        next_total = tl.load(totals + at, mask=head < NUM_HEADS, other=0.0)
        next_found = tl.load(founds + at[:, None] * HEAD_DIM + column[None, :], mask=is_place, other=0.0)
        peak, total, found = _fold(peak, total, found, next_peak, next_total, next_found)
    place = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(out + place, _divided(found, total).to(out.dtype.element_ty), mask=is_place)


def attend(
    queries_THD: Tensor,
    cache: LayerCache,
    tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    tiles: Tiles,
    num_parts: int,
    scale: float,
    window: int,
) -> Tensor:
    """See ``interface.StepAttention.attend``; ``num_parts`` programs share a split tile. Rows as in ``StepBatch``."""
    _, num_heads, head_dim = queries_THD.shape
    _, num_kv_heads, block_size, _ = cache.keys.shape
    assert queries_THD.is_contiguous()
    assert queries_THD.dtype is cache.keys.dtype is cache.values.dtype
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    out_THD = torch.empty_like(queries_THD)
    num_split = len(tiles.split_tokens)
    scratch = (num_split, num_heads, tiles.max_segments)
    peaks = queries_THD.new_empty(scratch, dtype=torch.float32)
    totals = torch.empty_like(peaks)  # memory of its own: aligned, whatever the shape
    founds = queries_THD.new_empty((*scratch, head_dim), dtype=torch.float32)
    attend_kernel[(len(tiles.tiles), num_kv_heads, num_parts)](
        queries_THD,
        *cache,
        out_THD,
        peaks,
        totals,
        founds,
        tiles.tiles,
        tables,
        query_starts,
        context_lens,
        tables.shape[1],
        tiles.max_segments,
        window,
        scale * _LOG2_E,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SEGMENT=SEGMENT,
        PAIRS=tile_pairs(num_heads // num_kv_heads),
        TILE=tile_positions(padded_dim, queries_THD.dtype),
        PADDED_DIM=padded_dim,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=False,
    )
    if num_split:
        fold_kernel[(num_split, triton.cdiv(num_heads, _HEADS_PER_FOLD))](
            peaks,
            totals,
            founds,
            out_THD,
            tiles.split_tokens,
            tiles.split_ends,
            tiles.max_segments,
            window,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            SEGMENT=SEGMENT,
            HEADS=_HEADS_PER_FOLD,
            PADDED_DIM=padded_dim,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out_THD


def tile_positions(padded_dim: int, dtype: torch.dtype) -> int:
    """Positions read at once, from the shape of a head alone."""
    return max(16, min(64, _TILE_BYTES // (padded_dim * dtype.itemsize)))
