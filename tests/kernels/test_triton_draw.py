"""Tokens chosen on the device are those that the definition chooses, and a row's token is its own."""

import numpy as np
import pytest
import torch

from services.executor import sampling
from services.executor.batch import SampleRow
from services.executor.kernels.triton import draw
from shared.wire.sampling import Sampling
from tests.fakes.triton_device import DEVICE

VOCAB_SIZE = 150
SAMPLINGS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, seed=2, top_k=5),
    Sampling(temperature=2.0, seed=3, top_p=0.8),
    Sampling(temperature=1.0, seed=4, min_p=0.2),
    Sampling(temperature=0.5, seed=5, top_k=30, top_p=0.9, min_p=0.01),
    Sampling(temperature=1e-5, seed=6),
    Sampling(temperature=1.0, seed=7, top_k=2**40),
]


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "_TILE", 64)


def rows_of(samplings: list[Sampling]) -> list[tuple[int, SampleRow]]:
    nothing = np.zeros(0, np.int32)
    return [(i, SampleRow(i, i, 0, sampling, 11 + i, nothing, 1)) for i, sampling in enumerate(samplings)]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_tokens_are_those_of_the_definition(ties: bool) -> None:
    logits = torch.randn(len(SAMPLINGS) + 2, VOCAB_SIZE, generator=torch.Generator().manual_seed(4)) * 3
    logits = (logits.round() if ties else logits).to(DEVICE)
    logits[2, ::3] = float("-inf")
    rows = rows_of(SAMPLINGS)
    chosen = draw.choose(logits.clone(), rows).tolist()
    assert chosen == sampling.on_host(logits.clone(), rows).tolist()
    assert chosen[len(SAMPLINGS) :] == logits[len(SAMPLINGS) :].argmax(dim=-1).tolist()
    for i in (0, 4):
        assert draw.choose(logits[i : i + 1].clone(), [(0, rows[i][1])]).tolist() == [chosen[i]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_without_a_finite_best_are_marked_and_the_others_unmoved() -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    rows = rows_of(SAMPLINGS[:1] * 3)
    expected = draw.choose(logits.clone(), rows).tolist()
    logits[0, 9], logits[1] = float("nan"), float("-inf")
    assert draw.choose(logits, rows).tolist() == [-1, -1, expected[2]]


def test_draws_follow_the_weights() -> None:
    """150 draws of three tokens that weigh 1, 2 and 5, within five standard deviations."""
    logits = torch.empty(150, 3, device=DEVICE)
    logits[:] = torch.tensor([1.0, 2.0, 5.0], device=DEVICE).log()
    counts = np.zeros(3)
    rows = [
        (i, SampleRow(i, i, 0, Sampling(temperature=1.0, seed=i * 7919), 40, np.zeros(0, np.int32), 1))
        for i in range(150)
    ]
    np.add.at(counts, draw.choose(logits, rows).tolist(), 1)
    expected = np.array([1, 2, 5]) / 8
    assert (abs(counts - 150 * expected) < 5 * np.sqrt(150 * expected * (1 - expected))).all()
