"""The fake model's distribution: logprobs, penalties and bias of a model that is one in all but sense."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from services.executor.backends import fake_ranking
from services.executor.backends.fake import FakeBackend
from services.executor.stepper import Stepper
from services.gateway.logprobs import Record, read_records
from shared import fake_model
from shared.wire import tokens
from shared.wire.executor import BatchResult, LaneLogprobs, Work, batch_plan, samples_of
from shared.wire.facts import ExecutorLimits
from shared.wire.sampling import Sampling
from tests.fakes.plans import admit, run_plan

LIMITS = ExecutorLimits(num_blocks=64, block_size=4, num_lanes=8, max_step_tokens=4096)
PROMPT = list(b"Once upon a time")
BLOCKS = range(64)


def generate(
    sampling: Sampling, num_tokens: int = 12, output: Sequence[int] = (), chunk: int = 100
) -> tuple[list[int], list[LaneLogprobs]]:
    """One request on a lane with all blocks, its prompt in chunks; what it says, and what is told of logprobs."""
    stepper = Stepper(FakeBackend(fake_model.facts(256), LIMITS))
    admits = [admit(0, PROMPT, BLOCKS, output=output, sampling=sampling)]
    said, told, position, step = list(output), list[LaneLogprobs](), 0, 0
    while len(said) < num_tokens:
        known = len(PROMPT) + len(said)
        count = min(chunk, known - position)
        work = Work(0, position, count, position + count == known)
        answer = run_plan(stepper, batch_plan(1, step, step - 1, admits=admits, work=[work]))
        assert isinstance(answer, BatchResult), answer
        said += [sample.token for sample in samples_of(answer)]
        told += answer.logprobs
        admits, position, step = [], position + count, step + 1
    return said, told


def bias(values: dict[int, float]) -> dict[str, Any]:
    return {"bias_ids": tokens.pack(values), "bias_values": tokens.pack_floats(values.values())}


def records(told: list[LaneLogprobs], num_logprobs: int) -> list[Record]:
    return [record for entry in told for record in read_records(entry.records, num_logprobs)]


def test_the_chosen_token_is_the_best_and_its_logprobs_are_those_of_a_distribution() -> None:
    said, told = generate(Sampling(seed=5, num_logprobs=20))
    assert said == generate(Sampling(seed=5))[0]
    assert [entry.start for entry in told] == [len(PROMPT) + i for i in range(12)]
    for token, record in zip(said, records(told, 20), strict=True):
        assert record.top_ids[0] == token
        assert record.logprob == record.top_logprobs[0]
        assert len(set(record.top_ids)) == 20
        assert list(record.top_logprobs) == sorted(record.top_logprobs, reverse=True)
        assert 0.99 < sum(map(math.exp, record.top_logprobs)) < 1


def test_fewer_logprobs_are_the_beginning_of_more() -> None:
    many = records(generate(Sampling(seed=5, num_logprobs=20))[1], 20)
    few = records(generate(Sampling(seed=5, num_logprobs=3))[1], 3)
    assert [record.top_ids for record in few] == [record.top_ids[:3] for record in many]
    assert [record.logprob for record in records(generate(Sampling(seed=5, num_logprobs=0))[1], 0)] == [
        record.logprob for record in many
    ]


@pytest.mark.parametrize("num_logprobs", [0, 5])
def test_prompt_logprobs_do_not_depend_on_chunks_and_are_not_told_again_once_there_is_output(num_logprobs: int) -> None:
    sampling = Sampling(seed=5, num_logprobs=num_logprobs, prompt_logprobs=True)
    said, told = generate(sampling)
    whole = told[0]
    assert whole.start == 1
    assert len(read_records(whole.records, num_logprobs)) == len(PROMPT) - 1
    for chunk in (1, 3, 5, 15, 16):
        said_in_chunks, told_in_chunks = generate(sampling, chunk=chunk)
        prompts = [entry for entry in told_in_chunks if entry.start < len(PROMPT)]
        assert said_in_chunks == said
        assert b"".join(entry.records for entry in prompts) == whole.records
        assert [entry for entry in told_in_chunks if entry not in prompts] == told[1:]
    resumed, told_of_resumed = generate(sampling, output=said[:5])
    assert resumed == said
    assert told_of_resumed == told[6:]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 5.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0, "repetition_penalty": 0.01},
        bias({300: 50.0}),
        {"min_tokens": 8, "stop_token_ids": tokens.pack(range(300, 700)), **bias({5: -1.0})},
    ],
)
def test_penalised_texts_go_on_the_same_after_a_preemption(params: dict[str, Any]) -> None:
    sampling = Sampling(seed=9, num_logprobs=2, **params)
    said, told = generate(sampling, 24)
    for cut in (1, 7, 23):
        resumed, told_of_resumed = generate(sampling, 24, output=said[:cut], chunk=5)
        assert resumed == said
        assert told_of_resumed == told[cut:]


def test_penalties_and_bias_change_what_is_said_and_never_what_is_told_of_the_model() -> None:
    plain = Sampling(seed=3, num_logprobs=5)
    said, told = generate(plain)
    best = read_records(told[0].records, 5)[0].top_ids
    banned, told_when_banned = generate(Sampling(seed=3, num_logprobs=5, **bias({best[0]: -100.0})), 1)
    assert banned == [best[1]]
    assert read_records(told_when_banned[0].records, 5)[0].top_ids == best
    assert generate(Sampling(seed=3, **bias({7: 100.0})), 3)[0] == [7, 7, 7]
    once = generate(Sampling(seed=3, presence_penalty=2.0, **bias({7: 45.5})), 2)[0]
    assert once[0] == 7
    assert once[1] != 7
    assert said[0] == best[0]


def test_repeating_is_what_a_repetition_penalty_stops() -> None:
    """With a bonus for it the text says one word for ever; with a penalty it does not."""
    bonus = generate(Sampling(seed=4, frequency_penalty=-2.0, repetition_penalty=0.01, **bias({300: 45.0})), 20)[0]
    assert len(set(bonus)) == 1
    assert len(set(generate(Sampling(seed=4, repetition_penalty=100.0), 20)[0])) == 20


def test_a_ranking_read_the_whole_table_of_choices() -> None:
    class Table(list[int]):
        num_reads = 0

        def __getitem__(self, place: Any) -> Any:
            self.num_reads += 1
            return super().__getitem__(place)

    table: Any = Table(range(4096))
    assert fake_ranking.ranking(table, 4090, 7) == [7, *range(4090, 4096), *range(7), *range(8, 58)]
    assert table.num_reads < 100
