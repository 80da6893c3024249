"""Logprobs of the raw distribution, as the records that travel. Called by ``sampling`` and the torch backend.

One row at a time, in numpy: a one-dimensional sum over a row of given length is always done in the same order, so a
row's record is the same to the bit alone, in any batch and at any cut of a prompt. torch's logsumexp is not: its order
varies with the number of rows.
"""

import numpy as np
from numpy.typing import NDArray

from services.executor.largest import Ids, Row, places_of_largest
from shared.wire.logprobs import FLOOR


def record(logits: Row, token: int, num_logprobs: int) -> bytes:
    """Tell of ``token`` and of the ``num_logprobs`` most likely tokens of a row of logits [V], which it only reads."""
    best = logits.max()
    if not np.isfinite(best):  # a prompt token in a request that will fail: JSON knows no NaN
        top = np.arange(num_logprobs)
        return _packed(np.full(1 + num_logprobs, FLOOR), top)
    log_total = np.log(np.exp(logits - best).sum(dtype=np.float64))
    top = places_of_largest(logits, num_logprobs)
    told = logits[np.append(token, top)].astype(np.float64) - np.float64(best) - log_total
    return _packed(np.maximum(told, FLOOR), top)


def _packed(logprobs: NDArray[np.float64], top: Ids) -> bytes:
    values = logprobs.astype("<f4")
    return values[:1].tobytes() + top.astype("<u4").tobytes() + values[1:].tobytes()
