"""Settings that make no sense are refused."""

import pytest

from services.scheduler.core.limits import Settings


@pytest.mark.parametrize(
    "fields",
    [
        {"max_inflight": 0},
        {"max_inflight": 3},
        {"max_step_tokens": 0},
        {"max_queue": 0},
        {"step_time_budget_ms": 0},
        {"recovery_timeout_ms": -1},
        {"step_timeout_ms": 0},
        {"policy": "lottery"},
        {"static_batch_size": 0},
        {"static_wait_ms": -1},
        {"ageing_ms": 0},
        {"tenant_weights": {"a": 0.0}},
        {"tenant_weights": {"a": float("nan")}},
        {"max_queue_tokens": 0},
        {"ttft_limit_ms": 0},
    ],
)
def test_nonsense_is_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Settings(**fields)


def test_the_defaults_make_sense():
    assert Settings().max_inflight == 2
