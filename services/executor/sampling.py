"""From logits to tokens. A token is a pure function of (its row's logits, its parameters, its seed, its position).

Called by the torch backend. Greedy rows that ask for nothing are settled by one maximum over the step's logits and pay
for nothing else. On the host every other row is numpy's, one at a time: along one row the order of a sum is fixed, so
that its token is the same alone and among any others (the order of torch's sums varies with the number of rows), and a
row stays in the cache from its first pass to its last.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor import logprobs, penalties
from services.executor.backend import StepOutput
from services.executor.batch import SampleRow
from services.executor.constraints import Masks, unpacked
from services.executor.kernels.download import Download
from services.executor.kernels.upload import upload
from services.executor.largest import Row, largest
from shared.wire.sampling import Sampling

_SPAN = 64
_NUCLEUS_CANDIDATES = 1024
"""Largest logits looked at before a whole row is sorted for top_p; the result is the same either way."""


Choose = Callable[[Tensor, Sequence[tuple[int, SampleRow]]], Tensor]
"""From logits [S, V] and those rows that draw to tokens, [S] int64, the best one where nothing is drawn; below 0 where
the best logit of a row is not finite."""


def on_host(logits: Tensor, drawing: Sequence[tuple[int, SampleRow]]) -> Tensor:
    """See ``Choose``. The tokens are on the host, wherever the logits are."""
    best, best_ids = logits.max(dim=-1)  # a NaN anywhere in a row makes its maximum NaN
    tokens = torch.where(torch.isfinite(best), best_ids, -1).cpu()
    chosen = tokens.numpy()
    drawn = [(i, row) for i, row in drawing if chosen[i] >= 0]
    numbers = uniforms([row.sampling.seed for _, row in drawn], [row.position for _, row in drawn])
    rows = _host_rows(logits, [i for i, _ in drawn])
    for (i, row), row_logits, number in zip(drawn, rows, numbers.tolist(), strict=True):
        chosen[i] = _draw(row_logits, row.sampling, number)
    return tokens


_NO_MASKS = Masks()


class Sampled:
    """Tokens that were chosen; on a device they may still have to be."""

    def __init__(self, tokens: Tensor, samples: Sequence[SampleRow], masks: Masks, raw: dict[int, Row]) -> None:
        """``raw`` are logits, as the model gave them, of the samples whose logprobs are told."""
        self.tokens = tokens
        """See ``Choose``."""
        self.arriving = Download(tokens)
        self._samples, self._masks, self._raw = samples, masks, raw

    def read(self) -> StepOutput:
        """Wait for the tokens."""
        chosen, masks = self.arriving.read(), self._masks
        failures = {index: _why_none(index, masks) for index, token in enumerate(chosen) if token < 0} | masks.failures
        output = StepOutput(chosen, failures, masks.late - failures.keys())
        for index, logits in self._raw.items():
            if index not in failures and index not in output.late:
                num_logprobs = self._samples[index].sampling.num_logprobs
                output.logprobs[index] = logprobs.record(logits, chosen[index], num_logprobs)
        return output


def sample(logits: Tensor, samples: Sequence[SampleRow], choose: Choose = on_host, masks: Masks = _NO_MASKS) -> Sampled:
    """Choose one token for each of ``samples`` from ``logits`` [S, V], float32 and contiguous, which it may overwrite.

    ``masks`` are those of the rows that have constraints. A row without a usable maximum (NaN, infinities, everything
    masked) becomes a failure of that row alone.
    """
    asking = [(i, row) for i, row in enumerate(samples) if not row.plain]
    changing = [(i, row) for i, row in asking if penalties.changes(row) and i not in masks.ended]
    telling = [i for i, row in asking if row.sampling.num_logprobs >= 0]
    raw = dict(zip(telling, _host_rows(logits, telling), strict=True))
    for i in {*(i for i, _ in changing), *masks.allowed} & raw.keys():
        raw[i] = raw[i].copy()
    if changing:
        penalties.apply(logits, changing)
    if masks.allowed:
        _forbid(logits, masks)
    tokens = choose(logits, [(i, row) for i, row in asking if row.sampling.temperature > 0])
    return Sampled(tokens, samples, masks, raw)


def _forbid(logits: Tensor, masks: Masks) -> None:
    """Take from each constrained row what its constraint does not allow."""
    if logits.device.type == "cpu":
        rows = logits.numpy()
        for i, allowed in masks.allowed.items():
            np.copyto(rows[i], -np.inf, where=unpacked(allowed, rows.shape[1]) == 0)
    else:
        _forbid_on_device(logits, masks)


def _forbid_on_device(logits: Tensor, masks: Masks) -> None:
    columns = np.array(list(masks.allowed), np.int64), np.stack(list(masks.allowed.values()))
    places, packed = upload(columns, logits.device)
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits[places] = logits[places].masked_fill(forbidden, float("-inf"))


def _why_none(index: int, masks: Masks) -> str:
    if index in masks.allowed:
        return "no token is left that the constraint and the other parameters allow, or the logits are not finite"
    return "the logits are not finite"


def _host_rows(logits: Tensor, places: Sequence[int]) -> list[Row]:
    """Rows of the logits, to be read; in the host's own memory they are not copied."""
    if not places:
        return []
    if logits.device.type == "cpu":
        rows = logits.numpy()
        return [rows[place] for place in places]
    return list(logits[list(places)].cpu().numpy())


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), the same on every machine.

    splitmix64's output function (Steele, Lea, Flood 2014) applied twice: mix(mix(seed + GAMMA) + position * GAMMA), of
    which the upper 53 bits are the number.
    """
    state = _mix(np.array(seeds, dtype=np.uint64) + _GAMMA)
    mixed = _mix(state + np.array(positions, dtype=np.uint64) * _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _draw(logits: Row, sampling: Sampling, number: float) -> int:
    """One token of one row [V], by a number in [0, 1)."""
    weights = logits - logits.max()  # the best is 0: no temperature can overflow
    with np.errstate(over="ignore"):  # a far worse one divided by a tiny temperature is -inf, as it should be
        weights /= np.float32(sampling.temperature)
    np.exp(weights, out=weights)
    _filter(weights, sampling)
    return _inverse(weights, number)


def _inverse(weights: Row, number: float) -> int:
    """Inverse of a row's cumulative distribution over token ids, at a number in [0, 1).

    Sums are float64: first of spans of 64 tokens, then over the spans, then inside the one that is hit.
    """
    spans = np.pad(weights, (0, -len(weights) % _SPAN)).reshape(-1, _SPAN)
    reached = np.cumsum(spans.sum(axis=1, dtype=np.float64))
    target = number * reached[-1]
    span = _first_above(reached, target)
    before = reached[span - 1] if span else 0.0
    return span * _SPAN + _first_above(before + np.cumsum(spans[span], dtype=np.float64), target)


def _first_above(cumulative: NDArray[np.float64], target: float) -> int:
    """The first index that exceeds ``target``, or, where rounding leaves none, the last one that adds anything."""
    last_to_add = np.searchsorted(cumulative, cumulative[-1], side="left")
    return int(min(np.searchsorted(cumulative, target, side="right"), last_to_add))


def _filter(weights: Row, sampling: Sampling) -> None:
    """Zero what top_k, then top_p of what is left, then min_p exclude, in one row whose best token weighs 1.

    Tokens that weigh exactly as much as the last one let through are let through too.
    """
    if 0 < sampling.top_k < len(weights):
        weights[weights < largest(weights, sampling.top_k)[-1]] = 0
    if sampling.top_p < 1:
        weights[weights < _nucleus_floor(weights, sampling.top_p)] = 0
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0


def _nucleus_floor(weights: Row, top_p: float) -> float:
    """Weight of the last of the fewest largest tokens that together reach ``top_p`` of the row's weight."""
    wanted = top_p * weights.sum(dtype=np.float64)
    for count in (min(_NUCLEUS_CANDIDATES, len(weights)), len(weights)):
        descending = largest(weights, count)
        reached = np.cumsum(descending, dtype=np.float64)
        if reached[-1] >= wanted:
            break
    return float(descending[min(np.searchsorted(reached, wanted), len(descending) - 1)])
