"""What a request's parameters change in its own logits before a token is chosen: penalties, bias, masked end tokens.

Called by ``sampling`` with the rows that ask for any of it, all at once: each kind is one gather and one scatter over
the step, element by element in float32. What has been said is read from the row's tokens each time and kept nowhere, so
a preemption or a move changes nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.batch import SampleRow, is_penalised
from services.executor.kernels.upload import upload
from shared.wire import tokens as columns

Ids = NDArray[np.int64]
Indexed = tuple[int, SampleRow]
"""A row of the logits and what it is."""


def changes(row: SampleRow) -> bool:
    """Whether a row's logits are not taken as they are."""
    sampling = row.sampling
    return is_penalised(sampling) or bool(sampling.bias_ids) or row.position - row.num_prompt < sampling.min_tokens


def apply(logits: Tensor, rows: Sequence[Indexed]) -> None:
    """Change the logits [S, V], float32 and contiguous, of ``rows`` in place.

    First repetition, then presence and frequency, then bias, then masks.
    """
    _repetition(logits, [(i, row) for i, row in rows if row.sampling.repetition_penalty != 1])
    _add(logits, _frequencies(rows))
    _add(logits, _biases(rows, logits.shape[-1]))
    _mask_until_min_tokens(logits, rows)


def _repetition(logits: Tensor, rows: Sequence[Indexed]) -> None:
    """Divide what is positive, multiply what is negative (Keskar et al. 2019, as transformers does it)."""
    if not rows:
        return
    # A token that is there twice is changed once: both times the same value is written in its place.
    parts = [(i, row.tokens.astype(np.int64), row.sampling.repetition_penalty) for i, row in rows]
    where = _flat(logits, [(i, ids) for i, ids, _ in parts])
    penalties = np.concatenate([np.full(len(ids), penalty, np.float32) for _, ids, penalty in parts])
    flat, put, choose = _arrays(logits)
    there, by = put(where), put(penalties)
    values = flat[there]
    flat[there] = choose(values > 0, values / by, values * by)


Change = tuple[int, Ids, NDArray[np.float32]]
"""A row of the logits, tokens, each at most once, and what is added to their logits."""


def _frequencies(rows: Sequence[Indexed]) -> list[Change]:
    changes = []
    for i, row in rows:
        presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
        output = row.tokens[row.num_prompt :]
        if (presence or frequency) and len(output):
            ids, counts = np.unique(output, return_counts=True)
            changes.append((i, ids.astype(np.int64), (-presence - frequency * counts).astype(np.float32)))
    return changes


def _biases(rows: Sequence[Indexed], vocab_size: int) -> list[Change]:
    changes = []
    for i, row in rows:
        if row.sampling.bias_ids:
            ids = np.array(columns.unpack(row.sampling.bias_ids), np.int64)
            values = np.array(columns.unpack_floats(row.sampling.bias_values), np.float32)
            known = ids < vocab_size
            changes.append((i, ids[known], values[known]))
    return changes


def _add(logits: Tensor, changes: Sequence[Change]) -> None:
    if changes:
        where = _flat(logits, [(i, ids) for i, ids, _ in changes])
        flat, put, _ = _arrays(logits)
        flat[put(where)] += put(np.concatenate([values for _, _, values in changes]))


def _mask_until_min_tokens(logits: Tensor, rows: Sequence[Indexed]) -> None:
    vocab_size = logits.shape[-1]
    masks = []
    for i, row in rows:
        if row.position - row.num_prompt < row.sampling.min_tokens:
            stops = np.array(columns.unpack(row.sampling.stop_token_ids), np.int64)
            masks.append((i, stops[stops < vocab_size]))
    if masks:
        flat, put, _ = _arrays(logits)
        flat[put(_flat(logits, masks))] = float("-inf")


class _Arrays(NamedTuple):
    """numpy's or torch's way to change a few hundred numbers where they lie."""

    flat: Any
    """The logits as one long row."""
    put: Callable[[Any], Any]
    """Brings an index or numbers to them."""
    choose: Callable[[Any, Any, Any], Any]


def _arrays(logits: Tensor) -> _Arrays:
    """In the host's memory numpy's: torch would wake its threads, and waits for them cost more than the work."""
    if logits.device.type == "cpu":
        return _Arrays(logits.numpy().reshape(-1), np.asarray, np.where)
    return _device_arrays(logits)


def _device_arrays(logits: Tensor) -> _Arrays:
    return _Arrays(logits.view(-1), lambda numbers: upload([numbers], logits.device)[0], torch.where)


def _flat(logits: Tensor, parts: Sequence[tuple[int, Ids]]) -> Ids:
    """Places of (row, token) in the flattened logits."""
    vocab_size = logits.shape[-1]
    return np.concatenate([i * vocab_size + ids for i, ids in parts])
