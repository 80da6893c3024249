"""A tally shows what prometheus_client's own histogram would."""

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from shared.tally import Tally, Total

BOUNDS = (0.1, 0.5, 1, 10)
LABELS = {"model_name": "m"}


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_tally_is_exposed_as_a_histogram_is() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("t_seconds", "Time.", LABELS, BOUNDS, ours)
    histogram = Histogram("t_seconds", "Time.", list(LABELS), buckets=BOUNDS, registry=theirs).labels(**LABELS)
    assert lines(ours) == lines(theirs)
    rng = random.Random(0)
    for value in [0.0, 0.1, 1, 10, 11, *(rng.expovariate(1) for _ in range(1000))]:
        tally.observe(value)
        histogram.observe(value)
    assert lines(ours) == lines(theirs)


def test_a_total_is_a_counter() -> None:
    registry = CollectorRegistry()
    total = Total("tokens", "Tokens.", LABELS, registry)
    total.value += 3
    assert registry.get_sample_value("tokens_total", LABELS) == 3
