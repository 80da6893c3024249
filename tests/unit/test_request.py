"""One transition table, and errors that tell the request's story."""

from pathlib import Path

import pytest

from services.scheduler.core.request import TRANSITIONS, IllegalTransition, Rank, Request, Status, Verb
from shared.wire import tokens
from shared.wire.gateway import Submit
from shared.wire.sampling import Sampling

DOCS = Path(__file__).parents[2] / "docs" / "scheduling.md"


def request(prompt=(1, 2, 3), output=(), **fields):
    submit = Submit(
        "r", tokens.pack(prompt), Sampling(**fields), 8, output=tokens.pack(output), resubmitted=bool(output)
    )
    return Request("gateway", submit, ticket=7)


def table_as_text():
    rows = ["| from | verb | to |", "| --- | --- | --- |"]
    rows += [f"| {status.value} | {verb.value} | {to.value} |" for (status, verb), to in TRANSITIONS.items()]
    return "\n".join(rows)


def test_the_documentation_holds_the_same_table():
    assert table_as_text() in DOCS.read_text()


def test_only_the_table_s_transitions_happen():
    for status in Status:
        for verb in Verb:
            one = request()
            one.status = status
            if (status, verb) in TRANSITIONS:
                one.move(verb, 0)
                assert one.status is TRANSITIONS[status, verb]
            else:
                with pytest.raises(IllegalTransition):
                    one.move(verb, 0)
                assert one.status is status


def test_ends_are_final():
    ends = {Status.FINISHED, Status.FAILED, Status.CANCELLED, Status.REJECTED, Status.ABANDONED}
    assert not ends & {status for status, _ in TRANSITIONS}


def test_an_unknown_pair_raises_with_the_story():
    one = request()
    one.move(Verb.ACCEPT, 5, "first")
    one.move(Verb.ADMIT, 9, "on executor-1")
    with pytest.raises(
        IllegalTransition, match=r"(?s)accept of a request that is running.*5 ms: accept first.*9 ms: admit"
    ):
        one.move(Verb.ACCEPT, 12)


def test_a_story_is_bounded_and_holds_no_text():
    one = request(prompt=[424242])
    one.move(Verb.ACCEPT, 0)
    for now_ms in range(1000):
        one.move(Verb.ADMIT, now_ms)
        one.move(Verb.PREEMPT, now_ms)
    assert len(one.tell().splitlines()) < 100
    assert "424242" not in one.tell()


def test_output_of_an_earlier_scheduler_is_output():
    one = request(prompt=[1, 2], output=[3, 4, 5])
    assert (one.num_prompt, one.num_output, one.tokens) == (2, 3, [1, 2, 3, 4, 5])
    assert (one.usage().prompt_tokens, one.usage().completion_tokens) == (2, 3)


def test_ranks_order_by_priority_then_streams_that_ran_before_then_arrival():
    ranks = [Rank(1, 0, 0), Rank(0, 1, 1), Rank(0, 0, 9), Rank(0, 1, 0), Rank(-1, 1, 50)]
    assert sorted(ranks) == [Rank(-1, 1, 50), Rank(0, 0, 9), Rank(0, 1, 0), Rank(0, 1, 1), Rank(1, 0, 0)]


@pytest.mark.parametrize(("num_output", "stops"), [(1, False), (2, False), (3, True)])
def test_a_stop_token_counts_only_after_min_tokens(num_output, stops):
    one = request(output=[9] * num_output, min_tokens=2)
    one.stops = frozenset([9])
    assert one.stops_with(9) is stops


def test_a_column_cut_within_an_integer_is_refused():
    with pytest.raises(ValueError, match=r"whole|multiple|length"):
        Request("gateway", Submit("r", b"\1\0\0", Sampling(), 1), 0)
