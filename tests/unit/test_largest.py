"""The largest numbers of a row, against sorting it, with many that are equal."""

import numpy as np
import pytest

from services.executor.largest import largest, places_of_largest, reach


@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 131, 3001, 49152])
@pytest.mark.parametrize("distinct", [1, 3, 10_000])
def test_against_sorting(length: int, distinct: int) -> None:
    draw = np.random.default_rng(length + distinct)
    for count in (1, 2, 20, 1024, length):
        if count > length:
            continue
        row = draw.integers(0, distinct, length).astype(np.float32)
        order = np.argsort(-row, kind="stable")[:count]
        assert largest(row, count).tolist() == row[order].tolist()
        assert places_of_largest(row, count).tolist() == order.tolist()


def test_few_more_than_wanted_are_looked_at() -> None:
    row = np.random.default_rng(0).normal(size=49152).astype(np.float32)
    assert 20 <= len(reach(row, 20)) < 40
    assert 1024 <= len(reach(row, 1024)) < 2048


def test_nothing_wanted_and_infinities() -> None:
    assert places_of_largest(np.zeros(3, np.float32), 0).tolist() == []
    row = np.array([-np.inf, 2.0, -np.inf, 5.0] * 50, np.float32)
    assert places_of_largest(row, 101)[-1] == 0
