"""Loads are seeded, trace files are read or refused with their line, and only what shares a prefix begins alike."""

from itertools import islice
from pathlib import Path

import pytest

from shared.wire import tokens
from tools.bench.workload import Calibration, Lengths, jobs
from tools.simulator.workload import Closed, Independent, Numbers, Sessions, Trace, TraceError, at_once, bursts

TRACE = """arrival,prompt_tokens,output_tokens,prefix_group,tenant,priority
1.5,10,3,,a,0
0.25,40,2,docs,b,-1
2,40,2,docs,,
"""


def test_requests_are_as_long_as_those_of_a_load_test_with_the_same_seed() -> None:
    prompts, outputs = Lengths.parse("5:50"), Lengths.parse("exp:20")
    sent = [
        (len(job.prompt.split()), job.max_tokens) for job in islice(jobs(3, Calibration(0, 1), prompts, outputs), 20)
    ]
    alone = Independent(at_once(), prompts, outputs, 3, 20)
    assert [(tokens.count(comer.prompt), comer.num_output) for comer in alone.arrivals()] == sent
    closed = Closed(4, 0, prompts, outputs, 3, 20)
    comers = list(closed.arrivals())
    while (comer := closed.after(comers[0], 0, True)) is not None:
        comers.append(comer)
    assert [(tokens.count(comer.prompt), comer.num_output) for comer in comers] == sent


def test_a_prompt_too_short_to_share_anything_is_its_own() -> None:
    numbers = Numbers()
    assert [tokens.count(numbers.prompt(1, "a", 5)) for _ in range(2)] == [1, 1]
    assert numbers.prompt(1, "a", 5) != numbers.prompt(1, "a", 5)


def test_prompts_share_exactly_their_groups_prefix() -> None:
    numbers = Numbers()
    one, other = numbers.prompt(40, "docs", 16), numbers.prompt(40, "docs", 16)
    alone = numbers.prompt(40)
    assert tokens.count(one) == tokens.count(alone) == 40
    assert tokens.unpack(one)[:16] == tokens.unpack(other)[:16]
    assert tokens.unpack(one)[16] != tokens.unpack(other)[16]
    assert tokens.unpack(one)[0] != tokens.unpack(alone)[0]


def test_a_prefix_leaves_a_token_of_its_own() -> None:
    assert tokens.count(Numbers().prompt(4, "docs", 9)) == 4


def test_bursts_and_everybody_at_once() -> None:
    assert list(islice(bursts(2, 1.5), 5)) == [0, 0, 1.5, 1.5, 3.0]
    assert list(islice(at_once(), 3)) == [0, 0, 0]


def test_the_same_seed_gives_the_same_load() -> None:
    def load(seed: int) -> list[object]:
        return list(Independent(bursts(1, 1), Lengths.parse("1:99"), Lengths.parse("exp:9"), seed, 20).arrivals())

    assert load(1) == load(1)
    assert load(1) != load(2)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    comers = list(Trace(tmp_path / "t.csv", None).arrivals())
    assert [arrival.at_us for arrival in comers] == [250_000, 1_500_000, 2_000_000]
    assert [(arrival.tenant, arrival.priority, arrival.num_output) for arrival in comers] == [
        ("b", -1, 2),
        ("a", 0, 3),
        ("", 0, 2),
    ]
    assert tokens.unpack(comers[0].prompt)[:20] == tokens.unpack(comers[2].prompt)[:20]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column arrival"),
        ("arrival,prompt_tokens\n", "no column output_tokens"),
        (TRACE + "x,1,1,,,\n", "line 5"),
        (TRACE + "1,0,1,,,\n", "line 5"),
        (TRACE + "1,1\n", "line 5"),
    ],
)
def test_a_bad_trace_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(TraceError, match=message):
        Trace(tmp_path / "t.csv", None)


def test_a_session_says_everything_again_and_ends_at_the_context() -> None:
    load = Sessions(at_once(), 1, Lengths.parse("50"), 0.5, Lengths.parse("10"), Lengths.parse("5"), 1, 100)
    (turn,) = load.arrivals()
    turns = [turn]
    while (following := load.after(turns[-1], turns[-1].at_us + 1000, True)) is not None:
        assert following.prompt.startswith(turns[-1].prompt)
        assert tokens.count(following.prompt) == tokens.count(turns[-1].prompt) + 5 + 10
        assert following.at_us > turns[-1].at_us
        turns.append(following)
    assert tokens.count(turns[-1].prompt) + 5 + 15 > 100
