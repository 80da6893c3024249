"""The lane mirror: what it lays out, and every plan it refuses."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from services.executor.backend import StepOutput
from services.executor.lanes import Lanes, LaneView
from services.executor.refusals import PlanError
from shared.wire.executor import Admit, Append, BatchPlan, LaneFailure, Work, batch_plan
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.sampling import Sampling
from tests.fakes.plans import admit

FACTS = ModelFacts("tiny", vocab_size=100, context_len=16, eos_token_ids=[1], tokenizer_digest="none")
LIMITS = ExecutorLimits(num_blocks=8, block_size=4, num_lanes=3, max_step_tokens=12)


class Told(list[object]):
    """What a backend is told."""

    def released(self, lane: int) -> None:
        self.append(f"lane {lane} is released")

    def taken(self, blocks: Sequence[int]) -> None:
        self.append(list(blocks))


def new_lanes(told: Told | None = None) -> Lanes:
    told = told if told is not None else Told()
    return Lanes(FACTS, LIMITS, told.released, told.taken)


def plan(
    retires: Sequence[int] = (),
    admits: Sequence[Admit] = (),
    appends: Sequence[tuple[int, int]] = (),
    work: Sequence[tuple[int, int, int, bool]] = (),
) -> BatchPlan:
    return batch_plan(1, 1, 0, retires, admits, [Append(*row) for row in appends], [Work(*row) for row in work])


def step(lanes: Lanes, the_plan: BatchPlan, *sampled: int) -> None:
    lanes.apply(the_plan)
    batch, _ = lanes.batch(the_plan)
    lanes.commit(lanes.launch(batch), StepOutput(list(sampled)))


def with_one_lane(num_tokens: int = 6, blocks: Sequence[int] = (5, 2)) -> Lanes:
    lanes = new_lanes()
    lanes.apply(plan(admits=[admit(0, list(range(10, 10 + num_tokens)), blocks)]))
    return lanes


def test_a_mixed_step_is_laid_out_flat() -> None:
    lanes = new_lanes()
    sampling = Sampling(seed=9)
    step(lanes, plan(admits=[admit(2, [20, 21], [7], sampling=sampling)], work=[(2, 0, 2, True)]), 42)
    second = plan(
        admits=[admit(0, [10, 11, 12, 13, 14, 15], [3, 0])], work=[(2, 2, 1, True), (0, 0, 5, False)], appends=[(2, 1)]
    )
    lanes.apply(second)
    batch, failures = lanes.batch(second)
    assert failures == []
    assert batch.lanes == [2, 0]
    assert batch.token_ids.tolist() == [42, 10, 11, 12, 13, 14]
    assert batch.positions.tolist() == [2, 0, 1, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [7 * 4 + 2, 12, 13, 14, 15, 0]
    assert batch.query_starts.tolist() == [0, 1, 6]
    assert batch.context_lens.tolist() == [3, 5]
    assert batch.block_tables.tolist() == [[7, 1], [3, 0]]
    (row,) = batch.samples
    assert (row.row, row.lane, row.seq, row.position, row.num_prompt) == (0, 2, 102, 3, 2)
    assert row.sampling is sampling
    assert row.tokens.tolist() == [20, 21, 42]
    assert not row.tokens.flags.writeable
    kinds = (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens, batch.block_tables)
    assert {array.dtype for array in kinds} == {np.dtype(np.int32)}
    assert batch.slot_mapping.dtype == np.int64


def test_tables_are_padded() -> None:
    lanes = new_lanes()
    both = plan(admits=[admit(0, [1] * 9, [0, 1, 2]), admit(1, [1, 2], [3])], work=[(0, 0, 9, True), (1, 0, 2, True)])
    lanes.apply(both)
    assert lanes.batch(both)[0].block_tables.tolist() == [[0, 1, 2], [3, -1, -1]]


def test_a_sampled_token_is_known_to_the_next_plan() -> None:
    lanes = with_one_lane(num_tokens=3, blocks=[5])
    step(lanes, plan(work=[(0, 0, 3, True)]), 77)
    assert lanes.view(0) == LaneView(100, [10, 11, 12, 77], 3, [5])
    step(lanes, plan(work=[(0, 3, 1, True)]), 78)
    assert lanes.view(0) == LaneView(100, [10, 11, 12, 77, 78], 4, [5])


def test_what_is_not_committed_can_be_planned_again() -> None:
    lanes = with_one_lane()
    first = plan(work=[(0, 0, 4, False)])
    lanes.batch(first)
    assert lanes.view(0).computed == 0
    lanes.batch(first)


def test_one_plan_retires_before_it_admits_and_admits_before_it_appends() -> None:
    """So a lane and its blocks change hands within one plan."""
    lanes = with_one_lane(blocks=[5, 2])
    step(
        lanes,
        plan([0], [admit(0, [30, 31, 32, 33, 34], [2], seq=9)], [(0, 5)], [(0, 0, 5, True)]),
        50,
    )
    assert lanes.view(0) == LaneView(9, [30, 31, 32, 33, 34, 50], 5, [2, 5])


def test_a_backend_is_told_of_retires_and_of_blocks_that_are_written_anew() -> None:
    told = Told()
    lanes = new_lanes(told)
    step(lanes, plan(admits=[admit(0, [1] * 6, [5, 2])], work=[(0, 0, 6, True)]), 1)
    assert told == [[5, 2]]
    lanes.apply(plan([0], [admit(1, [1] * 6, [5, 3], num_cached=4)], [(1, 2)]))
    assert told == [[5, 2], "lane 0 is released", [3], [2]]


def test_clear_retires_all_and_forgets_what_blocks_hold() -> None:
    told = Told()
    lanes = new_lanes(told)
    step(lanes, plan(admits=[admit(0, [1] * 6, [5, 2]), admit(2, [1], [4])], work=[(0, 0, 6, True)]), 1)
    lanes.clear()
    assert told[-2:] == ["lane 0 is released", "lane 2 is released"]
    assert lanes.open_lanes() == []
    with pytest.raises(PlanError, match="not every block of its 4 cached tokens is full"):
        lanes.apply(plan(admits=[admit(0, [1] * 6, [5, 2], num_cached=4)]))


@pytest.mark.parametrize("first_step", [(0, 0, 3, False), (0, 0, 5, False)])
@pytest.mark.parametrize("retired", [False, True])
def test_only_full_blocks_are_cached(first_step: tuple[int, int, int, bool], retired: bool) -> None:
    """Also those of a lane that has left; a step that did not run fills nothing."""
    lanes = with_one_lane()
    is_full = first_step[2] >= 4
    shared = plan([0] if retired else [], [admit(1, [1] * 6, [5, 3], num_cached=4)])
    lanes.batch(plan(work=[first_step]))
    step(lanes, plan(work=[first_step]))
    if is_full:
        lanes.apply(shared)
        return
    with pytest.raises(PlanError, match="not every block"):
        lanes.apply(shared)


def test_a_block_that_was_taken_anew_is_full_no_more() -> None:
    lanes = with_one_lane()
    step(lanes, plan(work=[(0, 0, 6, True)]), 7)
    lanes.apply(plan([0], [admit(1, [1] * 6, [5, 2])]))
    with pytest.raises(PlanError, match="not every block"):
        lanes.apply(plan([1], [admit(0, [1] * 6, [5, 2], num_cached=4)]))


def test_cached_tokens_are_not_computed() -> None:
    lanes = with_one_lane()
    step(lanes, plan(work=[(0, 0, 4, False)]))
    lanes.apply(plan([0]))
    lanes.apply(plan(admits=[admit(0, [1] * 6, [5, 2], num_cached=4)]))
    batch, _ = lanes.batch(plan(work=[(0, 4, 2, True)]))
    assert batch.positions.tolist() == [4, 5]
    assert batch.context_lens.tolist() == [6]


def test_a_lane_whose_sample_failed_is_left_out_until_it_is_retired() -> None:
    """A plan made before the scheduler knew goes on for the other lanes."""
    lanes = new_lanes()
    first = plan(admits=[admit(0, [1, 2], [0]), admit(1, [3, 4], [1])], work=[(0, 0, 2, True), (1, 0, 2, True)])
    lanes.apply(first)
    lanes.commit(lanes.launch(lanes.batch(first)[0]), StepOutput([0, 50], failures={0: "NaN"}))
    batch, failures = lanes.batch(plan(work=[(0, 2, 1, True), (1, 2, 1, True)]))
    assert batch.lanes == [1]
    assert batch.token_ids.tolist() == [50]
    assert failures == [LaneFailure(0, 100, "failed in an earlier step")]
    lanes.apply(plan([0], [admit(0, [1, 2], [0])]))
    assert lanes.batch(plan(work=[(0, 0, 2, True)]))[0].lanes == [0]


REFUSED_CHANGES = {
    "is not admitted and cannot be retired": plan([1]),
    "lane 3 is not admitted": plan([3]),
    "there is no lane 3": plan(admits=[admit(3, [1], [0])]),
    "lane 0 is admitted twice": plan(admits=[admit(0, [1], [0])]),
    "cannot hold 0 tokens": plan(admits=[Admit(1, 1, b"", 0, 0, b"", Sampling())]),
    "cannot hold 17 tokens": plan(admits=[admit(1, [1] * 17, [0])]),
    "outside the vocabulary": plan(admits=[admit(1, [100], [0])]),
    "2 of 1 tokens cannot be the prompt": plan(admits=[Admit(1, 1, b"\1\0\0\0", 2, 0, b"", Sampling())]),
    "4 of 4 tokens cannot be cached": plan(admits=[admit(1, [1] * 4, [0], num_cached=4)]),
    "lane 1 is given a block that does not exist": plan(admits=[admit(1, [1], [8])]),
    "lane 1 is given a block twice": plan(admits=[admit(1, [1], [0, 0])]),
    "given 5 blocks, more than the context needs": plan(admits=[admit(1, [1], [0, 1, 3, 4, 6])]),
    "table is too short for 5 cached tokens": plan(admits=[admit(1, [1] * 6, [0], num_cached=5)]),
    "a block that another lane holds": plan(admits=[admit(1, [1] * 6, [5, 2], num_cached=4)], work=[(0, 0, 4, False)]),
    "not every block of its 5 cached tokens is full": plan(admits=[admit(1, [1] * 6, [3, 4], num_cached=5)]),
    "lane 1 is not admitted and cannot be given": plan(appends=[(1, 0)]),
    "lane 0 is given a block that does not exist": plan(appends=[(0, 8)]),
    "lane 0 is given block 5 that it or another": plan(appends=[(0, 5)]),
    "lane 0 is given more blocks than the context": plan(appends=[(0, 0), (0, 1), (0, 3)]),
    "the columns of the appends differ": BatchPlan(1, 1, 0, append_lanes=b"\0\0\0\0"),
    "does not hold whole integers": BatchPlan(1, 1, 0, retires=b"\0\0\0"),
}


@pytest.mark.parametrize("why", REFUSED_CHANGES)
def test_a_change_that_does_not_fit_is_refused(why: str) -> None:
    """A plan's work stands for an earlier step's."""
    lanes = with_one_lane()
    if REFUSED_CHANGES[why].work_lanes:
        step(lanes, msgspec.structs.replace(REFUSED_CHANGES[why], admits=[]))
    with pytest.raises(PlanError, match=why):
        lanes.apply(REFUSED_CHANGES[why])


def test_what_fits_applies_even_when_something_else_does_not() -> None:
    lanes = with_one_lane()
    with pytest.raises(PlanError, match="lane 1 is not admitted"):
        lanes.apply(plan([1, 0], [admit(2, [1], [5]), admit(9, [1], [0])], [(2, 8), (2, 0)]))
    assert lanes.open_lanes() == [2]
    assert lanes.view(2).blocks == [5, 0]


REFUSED_WORK = {
    "there is no lane 3": plan(work=[(3, 0, 1, False)]),
    "lane 1: not admitted": plan(work=[(1, 0, 1, False)]),
    "twice in the work": plan(work=[(0, 0, 1, False), (0, 1, 1, False)]),
    "work without tokens": plan(work=[(0, 0, 0, False)]),
    "13 tokens in a step, over the limit of 12": plan(work=[(0, 0, 13, False)]),
    "does not follow the computed position": plan(work=[(0, 1, 1, False)]),
    "reaches beyond the known tokens": plan(work=[(0, 0, 10, False)]),
    "a sample is due at the last known token": plan(work=[(0, 0, 5, True)]),
    "due at the last known token, and only there": plan(work=[(0, 0, 9, False)]),
    "the table is too short": plan(work=[(0, 0, 9, True)]),
    "neither 0 nor 1": BatchPlan(
        1, 1, 0, work_lanes=bytes(4), work_starts=bytes(4), work_counts=b"\1\0\0\0", work_samples=b"\2\0\0\0"
    ),
    "the columns of the work differ": BatchPlan(1, 1, 0, work_lanes=bytes(4)),
    "does not hold whole integers": BatchPlan(1, 1, 0, work_lanes=b"\0"),
}


@pytest.mark.parametrize("why", REFUSED_WORK)
def test_work_that_does_not_fit_is_refused(why: str) -> None:
    with pytest.raises(PlanError, match=why):
        with_one_lane(num_tokens=9).batch(REFUSED_WORK[why])


def test_no_token_is_sampled_past_the_context() -> None:
    lanes = with_one_lane(num_tokens=16, blocks=[0, 1, 2, 3])
    step(lanes, plan(work=[(0, 0, 12, False)]))
    with pytest.raises(PlanError, match="no room for another token"):
        lanes.batch(plan(work=[(0, 12, 4, True)]))


def test_shared_blocks_are_never_written() -> None:
    """No plan gets this far: blocks are shared once they are full. It is the last guard of other lanes' tokens."""
    lanes = with_one_lane(num_tokens=6, blocks=[5, 2])
    lanes._holders[5] += 1
    with pytest.raises(PlanError, match="another lane holds too"):
        lanes.batch(plan(work=[(0, 0, 6, True)]))


def test_a_refused_step_changes_nothing() -> None:
    lanes = with_one_lane()
    before = lanes.view(0)
    with pytest.raises(PlanError):
        lanes.batch(plan(work=[(0, 0, 3, True)]))
    assert lanes.view(0) == before


def told_of(lanes: Lanes, the_plan: BatchPlan, *sampled: int) -> list[tuple[int, int, int, list[int]]]:
    """What a step is asked to tell of prompts: row, num_logprobs, start and tokens."""
    lanes.apply(the_plan)
    batch, _ = lanes.batch(the_plan)
    told = [(row.row, row.num_logprobs, row.start, row.tokens.tolist()) for row in batch.prompts]
    lanes.commit(lanes.launch(batch), StepOutput(list(sampled)))
    return told


def test_logprobs_of_a_prompt_are_asked_for_chunk_by_chunk_and_never_of_its_first_token() -> None:
    lanes = new_lanes()
    tells = Sampling(num_logprobs=2, prompt_logprobs=True)
    admits = [admit(0, [10, 11, 12, 13, 14, 15], [5, 2], sampling=tells), admit(1, [20, 21], [3])]
    assert told_of(lanes, plan(admits=admits, work=[(1, 0, 2, True), (0, 0, 3, False)]), 30) == [
        (1, 2, 1, [11, 12, 13])
    ]
    assert told_of(lanes, plan(work=[(0, 3, 1, False)])) == [(0, 2, 4, [14])]
    assert told_of(lanes, plan(work=[(0, 4, 2, True)]), 40) == [(0, 2, 5, [15])]
    assert told_of(lanes, plan(work=[(0, 6, 1, True)]), 41) == []


def test_a_prompt_that_led_to_output_was_told_before() -> None:
    lanes = new_lanes()
    tells = Sampling(num_logprobs=2, prompt_logprobs=True)
    again = admit(0, [10, 11, 12], [5], output=[40], sampling=tells)
    assert told_of(lanes, plan(admits=[again], work=[(0, 0, 4, True)]), 41) == []
    next_one = admit(0, [10, 11], [5], sampling=tells)
    assert told_of(lanes, plan(retires=[0], admits=[next_one], work=[(0, 0, 2, True)]), 42) == [(0, 2, 1, [11])]


def test_rows_say_whether_they_are_plain() -> None:
    lanes = new_lanes()
    admits = [admit(0, [10], [5]), admit(1, [20], [3], sampling=Sampling(presence_penalty=1.0))]
    lanes.apply(plan(admits=admits))
    batch, _ = lanes.batch(plan(work=[(0, 0, 1, True), (1, 0, 1, True)]))
    assert [sample.plain for sample in batch.samples] == [True, False]
