"""Penalties, bias and masks: against plain definitions, and never a neighbour's logits."""

from typing import Any

import numpy as np
import pytest
import torch

from services.executor import penalties
from services.executor.batch import SampleRow, is_plain
from shared.wire import tokens as columns
from shared.wire.sampling import Sampling

VOCAB_SIZE = 50


def a_row(known: list[int], num_prompt: int, **params: Any) -> SampleRow:
    return SampleRow(0, 0, 0, Sampling(**params), len(known), np.array(known, np.int32), num_prompt)


def biases(bias: dict[int, float]) -> dict[str, bytes]:
    return {"bias_ids": columns.pack(bias), "bias_values": columns.pack_floats(bias.values())}


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def changed(logits: torch.Tensor, *rows: SampleRow) -> torch.Tensor:
    logits = logits.clone()
    penalties.apply(logits, list(enumerate(rows)))
    return logits


def by_hand(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """One token at a time, as the words of docs/protocol.md say."""
    sampling, result = row.sampling, logits.clone()
    known, output = row.tokens.tolist(), row.tokens[row.num_prompt :].tolist()
    bias = dict(zip(columns.unpack(sampling.bias_ids), columns.unpack_floats(sampling.bias_values), strict=True))
    for token in range(VOCAB_SIZE):
        value = np.float32(logits[token].item())
        if token in known and sampling.repetition_penalty != 1:
            penalty = np.float32(sampling.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        if token in output:
            value += np.float32(-sampling.presence_penalty - sampling.frequency_penalty * output.count(token))
        value += np.float32(bias.get(token, 0.0))
        if len(output) < sampling.min_tokens and token in columns.unpack(sampling.stop_token_ids):
            value = np.float32("-inf")
        result[token] = float(value)
    return result


def random_row(draw: np.random.Generator) -> SampleRow:
    known = draw.integers(0, VOCAB_SIZE, draw.integers(1, 80)).tolist()
    chosen = draw.choice(VOCAB_SIZE, draw.integers(0, 5), replace=False).tolist()
    return a_row(
        known,
        int(draw.integers(1, len(known) + 1)),
        repetition_penalty=float(draw.choice([1.0, 1.3, 0.7])),
        presence_penalty=float(draw.choice([0.0, 1.5, -0.4])),
        frequency_penalty=float(draw.choice([0.0, 0.6, -2.0])),
        min_tokens=int(draw.choice([0, 30])),
        stop_token_ids=columns.pack(draw.integers(0, VOCAB_SIZE, 3).tolist()),
        **biases({token: float(draw.uniform(-100, 100)) for token in chosen}),
    )


def test_random_rows_equal_the_plain_definition() -> None:
    draw = np.random.default_rng(1)
    for batch in range(40):
        rows = [random_row(draw) for _ in range(6)]
        logits = random_logits(6, seed=batch)
        expected = torch.stack([by_hand(logits[i], row) for i, row in enumerate(rows)])
        assert torch.equal(changed(logits, *rows), expected)


def test_torch_changes_the_same_bits_as_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(3)
    rows = [random_row(draw) for _ in range(50)]
    logits = random_logits(50)
    expected = changed(logits, *rows)
    monkeypatch.setattr(penalties, "_arrays", penalties._device_arrays)
    assert torch.equal(changed(logits, *rows), expected)


@pytest.mark.cuda
def test_a_device_changes_the_same_bits() -> None:
    draw = np.random.default_rng(3)
    rows = [random_row(draw) for _ in range(50)]
    logits = random_logits(50)
    assert torch.equal(changed(logits.cuda(), *rows).cpu(), changed(logits, *rows))


def test_repetition_counts_prompt_and_output_and_the_others_only_output() -> None:
    logits = torch.ones(1, VOCAB_SIZE)
    logits[0, 4] = -1.0
    both = changed(logits, a_row([3, 4, 5], 2, repetition_penalty=2.0))[0]
    assert both[[3, 4, 5, 6]].tolist() == [0.5, -2.0, 0.5, 1.0]
    said = changed(logits, a_row([3, 5, 5, 7], 1, presence_penalty=1.0, frequency_penalty=0.25))[0]
    assert said[[3, 5, 7, 6]].tolist() == [1.0, -0.5, -0.25, 1.0]


def test_a_row_that_asks_for_nothing_is_not_touched_by_its_neighbours() -> None:
    draw = np.random.default_rng(2)
    logits = random_logits(5)
    rows = [random_row(draw) if i % 2 else a_row([1, 2], 1) for i in range(5)]
    result = changed(logits, *rows)
    assert torch.equal(result[::2], logits[::2])
    assert not torch.equal(result[1::2], logits[1::2])


def test_what_names_tokens_outside_the_vocabulary_is_harmless() -> None:
    logits = random_logits(2)
    stops = columns.pack([VOCAB_SIZE, 2**31])
    row = a_row([1], 1, min_tokens=5, stop_token_ids=stops, **biases({VOCAB_SIZE + 1: 5.0}))
    assert torch.equal(changed(logits, row, row), logits)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.1},
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"num_logprobs": 0},
        biases({1: 1.0}),
    ],
)
def test_what_makes_a_row_more_than_plain(params: dict[str, Any]) -> None:
    assert not is_plain(Sampling(**params))


def test_a_greedy_row_that_asks_for_nothing_is_plain_whatever_has_no_effect_on_it() -> None:
    assert is_plain(Sampling())
    assert is_plain(Sampling(seed=7, stop_token_ids=columns.pack([1]), top_k=5, top_p=0.5, min_p=0.1))
