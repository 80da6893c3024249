import json

import pytest

from tools.bench.figures import Limits, Outcome, percentile, percentiles, summarize


def outcome(ttft_s: float, tpot_s: float, tokens: int, sent_at: float = 0.0, failure: str = "") -> Outcome:
    last_at = sent_at + ttft_s + tpot_s * (tokens - 1)
    return Outcome(sent_at, sent_at + ttft_s, last_at, last_at, tokens, 100, tokens, failure)


def test_the_times_of_one_request() -> None:
    one = outcome(0.2, 0.05, 11)
    assert one.ttft_ms == pytest.approx(200)
    assert one.tpot_ms == pytest.approx(50)
    assert outcome(0.2, 0.05, 1).tpot_ms is None
    assert Outcome(0.0).ttft_ms is None


def test_the_server_counts_tokens_and_events_are_counted_only_where_it_does_not() -> None:
    assert Outcome(0.0, pieces=5, completion_tokens=9).output_tokens == 9
    assert Outcome(0.0, pieces=5).output_tokens == 5


def test_figures_of_a_load() -> None:
    slow_start, slow_text = outcome(1.0, 0.05, 11), outcome(0.1, 0.15, 11)
    good = [outcome(0.1, 0.05, 11, sent_at=i / 10) for i in range(8)]
    failed = [outcome(0.1, 0.1, 2, sent_at=8.0, failure="HTTP 503: full")]
    figures = summarize([slow_start, slow_text, *good, *failed], Limits(ttft_ms=500, tpot_ms=100), client_cpu_s=0.82)
    assert (figures.requests, figures.failed, figures.failures) == (11, 1, {"HTTP 503: full": 1})
    assert figures.seconds == pytest.approx(8.2)
    assert figures.requests_per_s == pytest.approx(10 / 8.2, abs=1e-3)
    assert figures.goodput_rps == pytest.approx(8 / 8.2, abs=1e-3)
    assert figures.output_tokens_per_s == pytest.approx(110 / 8.2, abs=1e-3)
    assert figures.input_tokens_per_s == pytest.approx(1000 / 8.2, abs=1e-3)
    assert figures.ttft_ms == {"p50": 100, "p90": 100, "p99": 1000}
    assert figures.client_cpu_share == pytest.approx(0.1)


def test_a_load_that_failed_as_a_whole_still_has_every_key() -> None:
    figures = summarize([outcome(0.1, 0.1, 1, failure="connection: refused")], Limits(), 0.0).as_json()
    assert {"output_tokens_per_s", "input_tokens_per_s", "requests_per_s", "goodput_rps", "failed"} <= figures.keys()
    assert figures["ttft_ms"] == figures["tpot_ms"] == {"p50": None, "p90": None, "p99": None}
    json.dumps(figures, allow_nan=False)


def test_without_limits_every_good_request_counts() -> None:
    figures = summarize([outcome(9, 9, 5), outcome(0.1, 0.1, 5)], Limits(), 0.0)
    assert figures.goodput_rps == figures.requests_per_s


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert percentiles([3.0, None, 1.0]) == {"p50": 1.0, "p90": 3.0, "p99": 3.0}
