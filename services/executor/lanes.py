"""The executor's mirror of lanes: their tokens, block tables and progress. Pure: numpy, no torch, no clock, no socket.

The scheduler owns the truth; this is a cache of it, rebuilt from plans and checked against every new one, so that a
mistake on either side ends in a refusal and never in wrong text. Called by ``Stepper``, in the compute thread.

A plan is taken in two parts, because they fail apart: ``apply`` (retires, admits, appends) always counts, ``batch``
(the work) counts only once it is launched and, when it has run, committed. Per-lane state lives in preallocated arrays,
so that a step of 256 decodes is built by a few array operations; the large ones are touched, and so take memory, only
where used. Here are block tables and the checks of a plan; what a lane knows and has computed is in ``progress``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from services.executor.backend import StepOutput
from services.executor.batch import PromptRow, SampleRow, StepBatch, is_plain
from services.executor.progress import NOBODY, Flight, Ints, Progress
from services.executor.refusals import PlanError, collect, column, refuse
from shared.wire.executor import Admit, BatchPlan, LaneFailure
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.sampling import Sampling

NO_BLOCK = -1
FAILED_BEFORE = "failed in an earlier step"


class LaneView(NamedTuple):
    """What the mirror believes of one lane, for tests that compare it with the scheduler's belief."""

    seq: int
    tokens: list[int]
    computed: int
    blocks: list[int]


class Lanes:
    """The lanes of one session. ``released(lane)`` is told of a retire, ``taken(blocks)`` of blocks to be written."""

    def __init__(
        self,
        facts: ModelFacts,
        limits: ExecutorLimits,
        released: Callable[[int], None],
        taken: Callable[[Sequence[int]], None],
    ) -> None:
        self._facts = facts
        self._limits = limits
        self._released = released
        self._taken = taken
        num_lanes = limits.num_lanes
        table_len = -(-facts.context_len // limits.block_size)
        self._progress = Progress(num_lanes, facts.context_len, facts.vocab_size)
        self._read_only_tokens = self._progress.tokens.view()
        self._read_only_tokens.flags.writeable = False
        self._tables = np.full((num_lanes, table_len), NO_BLOCK, np.int32)
        self._table_lens = np.zeros(num_lanes, np.int64)
        self._num_prompts = [0] * num_lanes
        self._samplings = [Sampling()] * num_lanes
        self._plain = [True] * num_lanes
        self._tells_prompt = np.zeros(num_lanes, np.bool_)
        self._holders = np.zeros(limits.num_blocks, np.int64)
        """How many lanes hold each block."""
        self._filled = np.zeros(limits.num_blocks, np.int64)
        """Tokens in each block that steps of this session have computed."""

    def open_lanes(self) -> list[int]:
        """Lanes that hold a request, in order."""
        lanes: list[int] = np.flatnonzero(self._progress.seqs != NOBODY).tolist()
        return lanes

    def view(self, lane: int) -> LaneView:
        """A copy of what is known of an open lane, steps in flight left out."""
        progress = self._progress
        return LaneView(
            seq=int(progress.seqs[lane]),
            tokens=progress.tokens[lane, : progress.known[lane]].tolist(),
            computed=int(progress.computed[lane]),
            blocks=self._tables[lane, : self._table_lens[lane]].tolist(),
        )

    def clear(self) -> None:
        """Retire every lane: the session is over."""
        for lane in self.open_lanes():
            self._retire(lane)
        self._filled[:] = 0

    def apply(self, plan: BatchPlan) -> None:
        """Retire, admit and append. What fits is applied even when something else does not; then raises PlanError."""
        problems: list[str] = []
        for lane in column(plan.retires).tolist():
            collect(problems, self._retire, lane)
        for admit in plan.admits:
            collect(problems, self._admit, admit)
        append_lanes, append_blocks = column(plan.append_lanes), column(plan.append_blocks)
        if len(append_lanes) != len(append_blocks):
            problems.append("the columns of the appends differ in length")
        else:
            for lane, block in zip(append_lanes.tolist(), append_blocks.tolist(), strict=True):
                collect(problems, self._append, lane, block)
        if problems:
            raise PlanError(problems[0])

    def batch(self, plan: BatchPlan) -> tuple[StepBatch, list[LaneFailure]]:
        """Lay the plan's work out flat, as it is once the step in flight has run. Raises PlanError; changes nothing.

        At most one step may be in flight: a promised token is fed from it. Work of a lane that failed by itself in an
        earlier step (planned before the scheduler could know) is left out; the second value answers its samples.
        """
        lanes, starts, counts = column(plan.work_lanes), column(plan.work_starts), column(plan.work_counts)
        samples = column(plan.work_samples)
        if not len(lanes) == len(starts) == len(counts) == len(samples):
            raise PlanError("the columns of the work differ in length")
        self._check_lanes(lanes, counts, samples)
        failures: list[LaneFailure] = []
        failed = self._progress.failed[lanes]
        if failed.any():
            failures = [
                LaneFailure(lane, int(self._progress.seqs[lane]), FAILED_BEFORE)
                for lane in lanes[failed & (samples == 1)].tolist()
            ]
            lanes, starts, counts, samples = (each[~failed] for each in (lanes, starts, counts, samples))
        self._check_ranges(lanes, starts, counts, samples)
        return self._lay_out(plan.step, lanes, starts, counts, samples), failures

    def launch(self, batch: StepBatch) -> Flight:
        """The step is on its way, and the next plan may work behind it. Steps are committed or rolled back in order."""
        return self._progress.launch(batch)

    def commit(self, flight: Flight, output: StepOutput) -> None:
        """The step ran: its ranges are computed, and its tokens are known. Adds to ``output.failures`` whoever failed
        in the step before, unknown when this one was launched.
        """
        for index in self._progress.failed_before(flight):
            output.failures[index] = FAILED_BEFORE
            output.late.discard(index)
        counts = self._progress.commit(flight, output)
        slots, size = flight.batch.slot_mapping, self._limits.block_size
        if not counts.all():
            slots = slots[np.repeat(counts, np.diff(flight.batch.query_starts))]
        self._filled[slots // size] = slots % size + 1  # of equal blocks the last counts

    def roll_back(self, flight: Flight) -> None:
        """The step failed, and with it every one launched after it, which must be rolled back too."""
        self._progress.roll_back(flight)

    def _retire(self, lane: int) -> None:
        if not self._is_open(lane):
            raise PlanError(f"lane {lane} is not admitted and cannot be retired")
        self._holders[self._tables[lane, : self._table_lens[lane]]] -= 1
        self._tables[lane, : self._table_lens[lane]] = NO_BLOCK
        self._table_lens[lane] = 0
        self._progress.retire(lane)
        self._released(lane)

    def _admit(self, admit: Admit) -> None:
        lane, tokens, blocks = admit.lane, column(admit.tokens), column(admit.blocks)
        if lane >= self._limits.num_lanes:
            raise PlanError(f"there is no lane {lane}")
        if self._is_open(lane):
            raise PlanError(f"lane {lane} is admitted twice")
        self._check_tokens(admit, tokens)
        self._check_blocks(admit, blocks)
        self._progress.admit(lane, admit.seq, tokens, admit.num_cached)
        self._tables[lane, : len(blocks)] = blocks
        self._table_lens[lane] = len(blocks)
        self._holders[blocks] += 1
        self._take(blocks[admit.num_cached // self._limits.block_size :].tolist())
        self._num_prompts[lane], self._samplings[lane] = admit.num_prompt, admit.sampling
        self._plain[lane] = is_plain(admit.sampling)
        # Who has output has been told of the whole prompt: the prompt came first.
        self._tells_prompt[lane] = admit.sampling.prompt_logprobs and admit.num_prompt == len(tokens)

    def _check_tokens(self, admit: Admit, tokens: Ints) -> None:
        if not 0 < len(tokens) <= self._facts.context_len:
            raise PlanError(
                f"lane {admit.lane} cannot hold {len(tokens)} tokens: the context is {self._facts.context_len}"
            )
        if tokens.max() >= self._facts.vocab_size:
            raise PlanError(f"lane {admit.lane} is given a token outside the vocabulary")
        if not 0 < admit.num_prompt <= len(tokens):
            raise PlanError(f"lane {admit.lane}: {admit.num_prompt} of {len(tokens)} tokens cannot be the prompt")
        if admit.num_cached >= len(tokens):
            raise PlanError(f"lane {admit.lane}: {admit.num_cached} of {len(tokens)} tokens cannot be cached")

    def _check_blocks(self, admit: Admit, blocks: Ints) -> None:
        """Blocks of cached tokens are full, and may be held by other lanes too; every other one must be nobody's."""
        if len(blocks) > self._tables.shape[1]:
            raise PlanError(f"lane {admit.lane} is given {len(blocks)} blocks, more than the context needs")
        if (blocks >= self._limits.num_blocks).any():
            raise PlanError(f"lane {admit.lane} is given a block that does not exist")
        if len(np.unique(blocks)) != len(blocks):
            raise PlanError(f"lane {admit.lane} is given a block twice")
        if len(blocks) * self._limits.block_size < admit.num_cached:
            raise PlanError(f"lane {admit.lane}: its table is too short for {admit.num_cached} cached tokens")
        num_shared, rest = divmod(admit.num_cached, self._limits.block_size)
        if rest or (self._filled[blocks[:num_shared]] < self._limits.block_size).any():
            raise PlanError(f"lane {admit.lane}: not every block of its {admit.num_cached} cached tokens is full")
        if self._holders[blocks[num_shared:]].any():
            raise PlanError(f"lane {admit.lane} is given a block that another lane holds")

    def _append(self, lane: int, block: int) -> None:
        if not self._is_open(lane):
            raise PlanError(f"lane {lane} is not admitted and cannot be given a block")
        if block >= self._limits.num_blocks:
            raise PlanError(f"lane {lane} is given a block that does not exist")
        if self._holders[block]:
            raise PlanError(f"lane {lane} is given block {block} that it or another lane holds")
        index = self._table_lens[lane]
        if index == self._tables.shape[1]:
            raise PlanError(f"lane {lane} is given more blocks than the context needs")
        self._tables[lane, index] = block
        self._table_lens[lane] += 1
        self._holders[block] = 1
        self._take([block])

    def _take(self, blocks: Sequence[int]) -> None:
        """Whatever these blocks held is given up."""
        self._filled[blocks] = 0
        self._taken(blocks)

    def _is_open(self, lane: int) -> bool:
        return lane < self._limits.num_lanes and bool(self._progress.seqs[lane] != NOBODY)

    def _check_lanes(self, lanes: Ints, counts: Ints, samples: Ints) -> None:
        """What must hold for every row, whatever its lane has computed."""
        if (lanes >= self._limits.num_lanes).any():
            raise PlanError(f"there is no lane {lanes.max()}")
        refuse(self._progress.seqs[lanes] == NOBODY, lanes, "not admitted and cannot work")
        if len(np.unique(lanes)) != len(lanes):
            raise PlanError("a lane is twice in the work")
        refuse(counts == 0, lanes, "work without tokens")
        refuse(samples > 1, lanes, "a sample mark that is neither 0 nor 1")
        if counts.sum() > self._limits.max_step_tokens:
            raise PlanError(f"{counts.sum()} tokens in a step, over the limit of {self._limits.max_step_tokens}")

    def _check_ranges(self, lanes: Ints, starts: Ints, counts: Ints, samples: Ints) -> None:
        """What must hold for a row against its lane's progress, tokens and table."""
        progress, ends = self._progress, starts + counts
        known = progress.known[lanes] + progress.promised[lanes]
        refuse(starts != progress.scheduled[lanes], lanes, "work does not follow the computed position")
        refuse(ends > known, lanes, "work reaches beyond the known tokens")
        refuse((samples == 1) != (ends == known), lanes, "a sample is due at the last known token, and only there")
        refuse((samples == 1) & (ends >= self._facts.context_len), lanes, "the context has no room for another token")
        refuse(ends > self._table_lens[lanes] * self._limits.block_size, lanes, "the table is too short for the work")

    def _lay_out(self, step: int, lanes: Ints, starts: Ints, counts: Ints, samples: Ints) -> StepBatch:
        size = self._limits.block_size
        ends = starts + counts
        query_starts = np.zeros(len(lanes) + 1, np.int64)
        np.cumsum(counts, out=query_starts[1:])
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
        lane_of = np.repeat(lanes, counts)
        blocks = self._tables[lane_of, positions // size].astype(np.int64)
        refuse(self._holders[blocks] > 1, lane_of, "work writes a block that another lane holds too")
        width = -(-int(ends.max(initial=0)) // size)
        batch = StepBatch(
            step=step,
            lanes=lanes.tolist(),
            token_ids=self._progress.tokens[lane_of, positions],
            positions=positions.astype(np.int32),
            slot_mapping=blocks * size + positions % size,
            query_starts=query_starts.astype(np.int32),
            context_lens=ends.astype(np.int32),
            block_tables=self._tables[lanes, :width],
            samples=self._sample_rows(lanes, np.flatnonzero(samples), ends),
            prompts=self._prompt_rows(lanes, starts, ends),
        )
        return self._fed(batch, lane_of) if self._progress.promised[lanes].any() else batch

    def _fed(self, batch: StepBatch, lane_of: Ints) -> StepBatch:
        """The batch with its promised tokens."""
        fed = np.flatnonzero(batch.positions >= self._progress.known[lane_of])
        batch.token_ids[fed] = 0
        return replace(batch, fed_tokens=fed, fed_samples=self._progress.sources[lane_of[fed]])

    def _sample_rows(self, lanes: Ints, rows: Ints, ends: Ints) -> list[SampleRow]:
        seqs, lanes, ends = self._progress.seqs[lanes[rows]], lanes[rows], ends[rows]
        samplings, num_prompts, tokens, plain = self._samplings, self._num_prompts, self._read_only_tokens, self._plain
        return [
            SampleRow(row, lane, seq, samplings[lane], end, tokens[lane, :end], num_prompts[lane], plain[lane])
            for row, lane, seq, end in zip(rows.tolist(), lanes.tolist(), seqs.tolist(), ends.tolist(), strict=True)
        ]

    def _prompt_rows(self, lanes: Ints, starts: Ints, ends: Ints) -> list[PromptRow]:
        """A position's logits tell of the token after it, as far as that is prompt."""
        prompts = []
        for row in np.flatnonzero(self._tells_prompt[lanes]).tolist():
            lane, first = int(lanes[row]), int(starts[row]) + 1
            last = min(int(ends[row]) + 1, self._num_prompts[lane])
            if first < last:
                told = self._read_only_tokens[lane, first:last]
                num_logprobs = max(0, self._samplings[lane].num_logprobs)
                prompts.append(PromptRow(row, lane, int(self._progress.seqs[lane]), num_logprobs, first, told))
        return prompts
