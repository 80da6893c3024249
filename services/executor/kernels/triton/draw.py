"""Choosing tokens on the device: one program a row, so that no logits travel and the next step can take them there.

Called by ``sampling`` through the torch backend. The definitions are ``sampling``'s: weights are exp((logit - best) /
temperature), filters are floors on the weight of a row, and the token is the inverse of the cumulative distribution at
the row's own number. Sums are float64, tile after tile in the order of token ids.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from services.executor.batch import SampleRow
from services.executor.kernels.upload import upload
from services.executor.sampling import uniforms

_TILE = 2048
_MAX_INT32 = 2**31 - 1


@triton.jit
def _weights(logits, start, best, temperature, vocab_size, TILE: tl.constexpr):
    """Weights of the tokens from ``start`` on; 0 past the last one."""
    token = start + tl.arange(0, TILE)
    logit = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
    return token, tl.exp((logit - best) / temperature)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["vocab_size"])
def draw_kernel(
    logits,
    bests,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    numbers,
    out,
    vocab_size,
    TILE: tl.constexpr,
):
    """Program (drawing row). A floor is found bit by bit: weights are never negative, so they order as their bits."""
    program = tl.program_id(0)
    row = tl.load(rows + program)
    best, temperature = tl.load(bests + row), tl.load(temperatures + program)
    top_k, top_p = tl.load(top_ks + program), tl.load(top_ps + program)
    logits += row * vocab_size

    floor_bits = tl.zeros([], dtype=tl.int32)
    if (top_k > 0) & (top_k < vocab_size):
        for step in range(31):
            tried = floor_bits | (1 << (30 - step))
            count = tl.zeros([], dtype=tl.int32)
            for start in range(0, vocab_size, TILE):
                _, weight = _weights(logits, start, best, temperature, vocab_size, TILE)
                count += tl.sum((weight >= _float(tried)).to(tl.int32), axis=0)
            floor_bits = tl.where(count >= top_k, tried, floor_bits)
    floor = _float(floor_bits)

    if top_p < 1.0:
        total = tl.zeros([], dtype=tl.float64)
        for start in range(0, vocab_size, TILE):
            _, weight = _weights(logits, start, best, temperature, vocab_size, TILE)
            total += tl.sum(tl.where(weight >= floor, weight, 0.0).to(tl.float64), axis=0)
        wanted = top_p * total
        nucleus_bits = tl.zeros([], dtype=tl.int32)
        for step in range(31):
            tried = nucleus_bits | (1 << (30 - step))
            least = tl.maximum(_float(tried), floor)
            reached = tl.zeros([], dtype=tl.float64)
            for start in range(0, vocab_size, TILE):
                _, weight = _weights(logits, start, best, temperature, vocab_size, TILE)
                reached += tl.sum(tl.where(weight >= least, weight, 0.0).to(tl.float64), axis=0)
            nucleus_bits = tl.where(reached >= wanted, tried, nucleus_bits)
        floor = tl.maximum(floor, _float(nucleus_bits))
    floor = tl.maximum(floor, tl.load(min_ps + program))

    total = tl.zeros([], dtype=tl.float64)
    for start in range(0, vocab_size, TILE):
        _, weight = _weights(logits, start, best, temperature, vocab_size, TILE)
        total += tl.sum(tl.where(weight >= floor, weight, 0.0).to(tl.float64), axis=0)
    target = tl.load(numbers + program) * total
    before = tl.zeros([], dtype=tl.float64)
    chosen, last = tl.zeros([], dtype=tl.int32) + vocab_size, tl.zeros([], dtype=tl.int32)
    for start in range(0, vocab_size, TILE):
        token, weight = _weights(logits, start, best, temperature, vocab_size, TILE)
        kept = tl.where(weight >= floor, weight, 0.0).to(tl.float64)
        is_above = (kept > 0.0) & (before + tl.cumsum(kept, axis=0) > target)
        chosen = tl.minimum(chosen, tl.min(tl.where(is_above, token, vocab_size), axis=0))
        last = tl.maximum(last, tl.max(tl.where(kept > 0.0, token, 0), axis=0))
        before += tl.sum(kept, axis=0)
    tl.store(out + program, tl.where(chosen < vocab_size, chosen, last).to(tl.int64))


def choose(logits: Tensor, drawing: Sequence[tuple[int, SampleRow]]) -> Tensor:
    """See ``sampling.Choose``. Waits for nothing."""
    best, chosen = logits.max(dim=-1)  # a NaN anywhere in a row makes its maximum NaN
    if drawing:
        rows, *parameters = upload(_parameters(drawing), logits.device)
        drawn = torch.empty_like(rows)
        draw_kernel[(len(rows),)](logits, best, rows, *parameters, drawn, logits.shape[1], TILE=_TILE, num_warps=8)
        chosen.index_copy_(0, rows, drawn)
    return torch.where(torch.isfinite(best), chosen, -1)


def _parameters(drawing: Sequence[tuple[int, SampleRow]]) -> list[NDArray[Any]]:
    samplings = [row.sampling for _, row in drawing]
    return [
        np.array([index for index, _ in drawing], np.int64),
        np.array([sampling.temperature for sampling in samplings], np.float32),
        np.array([min(sampling.top_k, _MAX_INT32) for sampling in samplings], np.int32),
        np.array([sampling.top_p for sampling in samplings], np.float64),
        np.array([sampling.min_p for sampling in samplings], np.float32),
        uniforms([sampling.seed for sampling in samplings], [row.position for _, row in drawing]),
    ]
