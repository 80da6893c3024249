"""Records of logprobs against torch's own log_softmax, with ties, infinities and the floor."""

import numpy as np
import pytest
import torch

from services.executor import logprobs
from services.gateway.logprobs import Record, read_records
from shared.wire.logprobs import FLOOR


def a_record(logits: list[float] | np.ndarray, token: int, num_logprobs: int) -> Record:
    (record,) = read_records(logprobs.record(np.array(logits, np.float32), token, num_logprobs), num_logprobs)
    return record


@pytest.mark.parametrize("num_logprobs", [0, 1, 20])
def test_against_log_softmax(num_logprobs: int) -> None:
    for seed in range(20):
        logits = torch.randn(5000, generator=torch.Generator().manual_seed(seed)) * 4
        expected = torch.log_softmax(logits.double(), 0)
        record = a_record(logits.numpy(), seed, num_logprobs)
        assert record.logprob == pytest.approx(expected[seed].item(), rel=1e-6)
        values, ids = expected.topk(num_logprobs)
        assert list(record.top_ids) == ids.tolist()
        assert list(record.top_logprobs) == pytest.approx(values.tolist(), rel=1e-6)


def test_of_equal_tokens_the_lowest_id_comes_first() -> None:
    logits = np.zeros(300, np.float32)
    logits[[250, 17]] = 1.0
    assert list(a_record(logits, 0, 4).top_ids) == [17, 250, 0, 1]


def test_nothing_is_below_the_floor() -> None:
    record = a_record([0.0, -np.inf, -20_000.0, -1.0], 1, 4)
    assert record.logprob == FLOOR
    assert list(record.top_ids) == [0, 3, 2, 1]
    assert list(record.top_logprobs)[2:] == [FLOOR, FLOOR]
    assert all(np.isfinite(record.top_logprobs))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_give_numbers_all_the_same(bad: float) -> None:
    record = a_record([0.0, bad, 1.0], 0, 2)
    assert (record.logprob, list(record.top_logprobs)) == (FLOOR, [FLOOR, FLOOR])


def test_the_logits_are_only_read() -> None:
    logits = np.random.default_rng(0).normal(size=100).astype(np.float32)
    before = logits.copy()
    logits.flags.writeable = False
    logprobs.record(logits, 3, 5)
    assert (logits == before).all()
