"""A backend without torch or a model, whose every token proves the tables right. Needs numpy, and llguidance for
constraints.

The KV of a token is its id, stored in its slot. The next token is a hash of (seed, all ids of the context), the ids
being read back through the block table, and slots are poisoned when their block changes hands: any mistake in tables,
sharing or fencing changes the text or stops the step. Loaded by ``main``; also built directly by tests, with worlds as
tiny as they like.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from services.executor.backend import Done, StepOutput
from services.executor.backends import fake_faults, fake_ranking
from services.executor.backends.fake_constrained import constrained_choice
from services.executor.backends.fake_faults import Faults, Striker
from services.executor.batch import PromptRow, SampleRow, StepBatch
from services.executor.constraints import Constraints, Masks
from services.executor.options import ExecutorOptions
from shared import fake_model
from shared.constraints import read_vocabulary
from shared.wire import tokens
from shared.wire.facts import MAX_BLOCKS, ExecutorLimits, ModelFacts
from shared.wire.sampling import Constraint

POISON = -1
DEFAULT_NUM_BLOCKS = 4096
BYTES_PER_SLOT = 4

NUM_CHOICES = 4096
"""Length of the table that maps a hash to a token of the made-up vocabulary."""
SPREAD = 1021
"""Odd, so that every choice keeps its share; neighbours in the table are then of different kinds."""
PUNCTUATION = b",.!?;:-\n"
TWO_BYTE_LEADS = range(0xC3, 0xE0)
"""First bytes of a two-byte character: the token after one of them is always its second byte."""

Hashes = NDArray[np.uint64]


class FakeBackend:
    """Deterministic in every process. With facts of any other vocabulary than the made-up one, tokens are uniform."""

    def __init__(self, facts: ModelFacts, limits: ExecutorLimits, faults: Faults | None = None) -> None:
        self.facts = facts
        self.limits = limits
        self.device = "cpu"
        self.numerics = "fake-1"
        self.batch_dependent: list[str] = []
        self._faults = faults or Faults()
        self._striker = Striker(self._faults.rules)
        self._constraints = Constraints(facts, partial(read_vocabulary, facts, None))
        self._speaks = facts.vocab_size == fake_model.VOCAB_SIZE
        self._choices = _made_up_choices() if self._speaks else np.arange(facts.vocab_size)
        self._kv = np.full((limits.num_blocks, limits.block_size), POISON, np.int32)
        table_len = -(-facts.context_len // limits.block_size)
        places = np.arange(1, table_len * limits.block_size + 1, dtype=np.uint64)
        self._weights: Hashes = _mix(places).reshape(table_len, limits.block_size) | np.uint64(1)
        """A random odd factor for each position of a context."""

    def warm_up(self) -> None:
        """Nothing is slow the first time."""

    def prepare(self, constraint: Constraint) -> None:
        """See ``Backend``."""
        self._constraints.prepare(constraint)

    def released(self, lane: int) -> None:
        """Its faults and its constraint are forgotten; what its blocks hold stays."""
        self._striker.forget(lane)
        self._constraints.released(lane)

    def taken(self, blocks: Sequence[int]) -> None:
        """Poison the slots: whoever reads them before writing them is caught."""
        self._kv[blocks] = POISON

    def launch(self, batch: StepBatch) -> Done:
        """See ``Backend``."""
        return Done(self.run(batch))

    def run(self, batch: StepBatch) -> StepOutput:
        """Store the step's tokens, read every sampled context back, hash it into the next token."""
        started = time.perf_counter()
        self._kv.reshape(-1)[batch.slot_mapping] = batch.token_ids
        output = StepOutput([])
        if batch.samples:
            output = self._sample(batch)
            output.failures |= self._striker.strike(batch.samples)
            output.late -= output.failures.keys()
            for index in [*output.failures, *output.late]:
                output.logprobs.pop(index, None)
        output.prompt_logprobs = [self._prompt_logprobs(batch, prompt) for prompt in batch.prompts]
        self._pace(batch, started)
        return output

    def _pace(self, batch: StepBatch, started: float) -> None:
        """Take as long as the cost model says; rows of more than one token are prefill."""
        if not (self._faults.step_ms or self._faults.prefill_ms_per_token):
            return
        counts = np.diff(batch.query_starts)
        prefill_tokens = int(counts[counts > 1].sum())
        cost_ms = self._faults.step_ms + self._faults.prefill_ms_per_token * prefill_tokens
        time.sleep(max(0.0, started + cost_ms / 1000 - time.perf_counter()))

    def _sample(self, batch: StepBatch) -> StepOutput:
        hashes, last_ids = self._read(batch)
        hashes ^= _mix(np.array([sample.sampling.seed for sample in batch.samples], np.uint64))
        hashes = _mix(hashes)
        places = hashes % np.uint64(len(self._choices))
        chosen = self._choices[places]
        if self._speaks:
            open_character = (last_ids >= TWO_BYTE_LEADS.start) & (last_ids < TWO_BYTE_LEADS.stop)
            chosen = np.where(open_character, 0x80 + (hashes >> np.uint64(58)).astype(np.int64), chosen)
        picked: list[int] = chosen.tolist()
        output = StepOutput(picked)
        masks = self._constraints.masks(batch.samples)
        output.failures, output.late = masks.failures, masks.late
        for index, sample in enumerate(batch.samples):
            if not sample.plain:
                self._attend_to(sample, index, int(hashes[index]), masks, output)
        return output

    def _attend_to(self, sample: SampleRow, index: int, hash_: int, masks: Masks, output: StepOutput) -> None:
        """What a row asks for beyond its most likely token."""
        sampling, best, place = sample.sampling, output.tokens[index], hash_ % len(self._choices)
        if index in masks.allowed:
            token = constrained_choice(masks.allowed[index], index in masks.ended, best, hash_, sample)
            if token is None:
                output.failures[index] = "no token is left that the constraint and the other parameters allow"
            else:
                output.tokens[index] = token
        elif fake_ranking.penalises(sampling):
            ranked = fake_ranking.ranking(self._choices, place, best)
            output.tokens[index] = fake_ranking.penalised_choice(ranked, sample, self.facts.vocab_size)
        elif sample.position - sample.num_prompt < sampling.min_tokens:
            output.tokens[index] = self._not_a_stop(best, place, sample)
        if sampling.num_logprobs >= 0:
            ranked = fake_ranking.ranking(self._choices, place, best)
            output.logprobs[index] = fake_ranking.record(ranked, output.tokens[index], sampling.num_logprobs)

    def _prompt_logprobs(self, batch: StepBatch, prompt: PromptRow) -> bytes:
        """The order of tokens after a prompt token is made up from that token and its position."""
        first = batch.query_starts[prompt.row]
        before: Hashes = batch.token_ids[first : first + len(prompt.tokens)].astype(np.uint64)
        positions: Hashes = np.arange(prompt.start, prompt.start + len(prompt.tokens), dtype=np.uint64)
        places = _mix(_mix(before) ^ positions)
        records = []
        for place, token in zip((places % np.uint64(NUM_CHOICES)).tolist(), prompt.tokens.tolist(), strict=True):
            ranked = fake_ranking.ranking(self._choices, place, int(self._choices[place % len(self._choices)]))
            records.append(fake_ranking.record(ranked, token, prompt.num_logprobs))
        return b"".join(records)

    def _read(self, batch: StepBatch) -> tuple[Hashes, NDArray[np.int32]]:
        """Each sampled row's context through its block table: [S] sum of weight * (id + 1), and [S] the last ids."""
        rows = [sample.row for sample in batch.samples]
        lens = batch.context_lens[rows].astype(np.int64)
        num_blocks = -(-lens // self.limits.block_size)
        used = np.arange(batch.block_tables.shape[1]) < num_blocks[:, None]
        blocks = batch.block_tables[rows][used]
        assert blocks.min() >= 0, "a block table is shorter than its context"
        ids = self._kv[blocks]
        weights = self._weights[np.nonzero(used)[1]]
        ends = np.cumsum(num_blocks) - 1
        last_offsets = (lens - 1) % self.limits.block_size
        beyond = np.arange(self.limits.block_size) > last_offsets[:, None]
        last_ids = ids[ends, last_offsets]
        ids[ends] = np.where(beyond, 0, ids[ends])
        weights[ends] = np.where(beyond, 0, weights[ends])
        assert ids.min() >= 0, "a slot was read that nobody has written since it was freed"
        sums = ((ids.astype(np.uint64) + np.uint64(1)) * weights).sum(axis=1)
        return np.add.reduceat(sums, ends - num_blocks + 1), last_ids

    def _not_a_stop(self, token: int, place: int, sample: SampleRow) -> int:
        """The token, or the next one in the table of choices that does not end the request (itself when all do)."""
        stops = set(tokens.unpack(sample.sampling.stop_token_ids))
        if token not in stops:
            return token
        others: list[int] = np.roll(self._choices, -place).tolist()
        return next((other for other in others if other not in stops), token)


def load(options: ExecutorOptions, on_progress: Callable[[str], None]) -> FakeBackend:
    """Build the backend an executor process runs. Raises ValueError for options or faults that make no sense."""
    faults = fake_faults.parse(os.environ.get(fake_faults.VARIABLE, ""))
    if faults.start_delay_s:
        on_progress(f"waiting {faults.start_delay_s:g} s, as {fake_faults.VARIABLE} says")
        time.sleep(faults.start_delay_s)
    num_blocks = options.num_blocks
    if num_blocks is None and options.kv_memory is not None:
        num_blocks = min(options.kv_memory // (BYTES_PER_SLOT * options.block_size), MAX_BLOCKS)
    limits = ExecutorLimits(
        num_blocks=DEFAULT_NUM_BLOCKS if num_blocks is None else num_blocks,
        block_size=options.block_size,
        num_lanes=options.max_lanes,
        max_step_tokens=options.max_step_tokens,
    )
    return FakeBackend(fake_model.facts(options.max_model_len or fake_model.CONTEXT_LEN), limits, faults)


def _made_up_choices() -> NDArray[np.int64]:
    """Of 64 hashes one ends the text, four are punctuation, one starts a two-byte character, the rest are words."""
    num_ends, num_marks, num_leads = NUM_CHOICES // 64, NUM_CHOICES // 16, NUM_CHOICES // 64
    words = range(fake_model.FIRST_WORD, fake_model.FIRST_SPECIAL)
    num_words = NUM_CHOICES - num_ends - num_marks - num_leads
    choices = np.concatenate(
        [
            np.resize([fake_model.IM_END, fake_model.IM_END, fake_model.IM_END, fake_model.END_OF_TEXT], num_ends),
            np.resize(list(PUNCTUATION), num_marks),
            np.resize(list(TWO_BYTE_LEADS), num_leads),
            np.resize(list(words), num_words),
        ]
    )
    spread = np.arange(NUM_CHOICES) * SPREAD % NUM_CHOICES
    return choices[spread]


def _mix(values: Hashes) -> Hashes:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), element by element, modulo 2**64."""
    values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
