"""How far each lane has got: the tokens it knows, what of them is computed, and what steps in flight will add.

Owned by ``lanes``; pure. The words are the scheduler's: computed <= scheduled <= known, where the tokens that steps in
flight have promised are known too. A step that is launched moves ``scheduled`` and promises a token for each of its
samples. When it is read, ``computed`` follows and the tokens are there; when it fails, its lanes go back to what is
computed. Between the two a lane may be retired and taken by another request: what the step says of it is then dropped.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.executor.backend import StepOutput
from services.executor.batch import StepBatch

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

NOBODY = -1


class Flight(NamedTuple):
    """A step between its launch and its end, and whose rows it computes."""

    batch: StepBatch
    lanes: Ints
    """[R]"""
    seqs: Ints
    """[R] of the admissions that the lanes were held by."""
    sampled: Ints
    """[S] work row of each sample."""


class Progress:
    """Of every lane of a session. Arrays are indexed by lane; others read them, and change them only through here."""

    def __init__(self, num_lanes: int, context_len: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.tokens = np.zeros((num_lanes, context_len), np.int32)
        self.known = np.zeros(num_lanes, np.int64)
        """Tokens that are here; ``promised`` ones follow them."""
        self.promised = np.zeros(num_lanes, np.int64)
        self.sources = np.zeros(num_lanes, np.int64)
        """Which sample of the step launched last the last promised token is."""
        self.computed = np.zeros(num_lanes, np.int64)
        self.scheduled = np.zeros(num_lanes, np.int64)
        self.failed = np.zeros(num_lanes, np.bool_)
        """A lane that failed by itself: nothing is computed for it any more."""
        self.seqs = np.full(num_lanes, NOBODY, np.int64)
        """Of the admission that holds the lane."""

    def admit(self, lane: int, seq: int, tokens: Ints, num_cached: int) -> None:
        """A request takes a lane that nobody holds."""
        self.tokens[lane, : len(tokens)] = tokens
        self.known[lane], self.promised[lane] = len(tokens), 0
        self.computed[lane] = self.scheduled[lane] = num_cached
        self.failed[lane], self.seqs[lane] = False, seq

    def retire(self, lane: int) -> None:
        """Nobody holds the lane."""
        self.seqs[lane] = NOBODY

    def launch(self, batch: StepBatch) -> Flight:
        """The step is on its way."""
        lanes = np.array(batch.lanes, np.int64)
        sampled = np.array([sample.row for sample in batch.samples], np.int64)
        self.scheduled[lanes] = batch.context_lens
        self.promised[lanes[sampled]] += 1
        self.sources[lanes[sampled]] = np.arange(len(sampled))
        return Flight(batch, lanes, self.seqs[lanes], sampled)

    def failed_before(self, flight: Flight) -> list[int]:
        """Samples of lanes that have failed by themselves since the launch, in the step before: they mean nothing."""
        if not self.failed.any():
            return []
        return np.flatnonzero((self._stays(flight) & self.failed[flight.lanes])[flight.sampled]).tolist()

    def commit(self, flight: Flight, output: StepOutput) -> Mask:
        """The step ran: its ranges are computed, and its tokens are known. Returns which rows count, [R]."""
        batch, counts = flight.batch, self._stays(flight) & ~self.failed[flight.lanes]
        self.computed[flight.lanes[counts]] = batch.context_lens[counts]
        if not batch.samples:
            return counts
        assert len(output.tokens) == len(batch.samples), "the backend must give one token for each sampled row"
        lanes, tokens, got = flight.lanes[flight.sampled], np.array(output.tokens, np.int64), counts[flight.sampled]
        if output.failures or output.late:
            spoilt = np.zeros(len(tokens), np.bool_)
            spoilt[[*output.failures, *output.late]] = True
            self.failed[lanes[got & spoilt]] = True
            tokens[spoilt], got = 0, got & ~spoilt
        assert ((tokens >= 0) & (tokens < self._vocab_size)).all(), "the backend sampled outside the vocabulary"
        lanes = lanes[got]
        self.tokens[lanes, self.known[lanes]] = tokens[got]
        self.known[lanes] += 1
        self.promised[lanes] -= 1
        return counts

    def roll_back(self, flight: Flight) -> None:
        """The step failed, and with it every one launched after it, which must be rolled back too."""
        lanes = flight.lanes[self._stays(flight)]
        self.scheduled[lanes] = self.computed[lanes]
        self.promised[lanes] = 0

    def _stays(self, flight: Flight) -> Mask:
        """Which rows' lanes are still held by the same admission."""
        stays: Mask = self.seqs[flight.lanes] == flight.seqs
        return stays
