"""Tokens from logits: every filter against a plain definition, and rows that never notice their neighbours."""

from typing import Any

import numpy as np
import pytest
import torch

from services.executor import sampling
from services.executor.batch import SampleRow, is_plain
from services.executor.constraints import Masks
from shared.wire import tokens as columns
from shared.wire.sampling import Constraint, Sampling

VOCAB_SIZE = 1000


def a_row(params: Sampling, position: int = 10, num_prompt: int = 10) -> SampleRow:
    return SampleRow(0, 0, 0, params, position, np.zeros(position, np.int32), num_prompt)


def chosen(logits: torch.Tensor, *rows: SampleRow) -> list[int]:
    output = sampling.sample(logits.clone(), rows).read()
    assert output.failures == {}
    return output.tokens


def random_logits(rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def support(logits: torch.Tensor, draws: int = 400, **params: Any) -> set[int]:
    """Tokens that come up over many positions."""
    rows = [a_row(Sampling(**params), position=position, num_prompt=1) for position in range(1, draws + 1)]
    return set(chosen(logits.expand(draws, -1), *rows))


def test_greedy_is_the_first_maximum() -> None:
    logits = random_logits(3)
    logits[1, [700, 7]] = 99.0
    assert chosen(logits, *[a_row(Sampling())] * 3) == [int(row.argmax()) for row in logits]
    assert chosen(logits, *[a_row(Sampling())] * 3)[1] == 7


def test_the_random_numbers_are_the_published_generator() -> None:
    """splitmix64 in plain integers; its first output for seed 0 is published as 0xE220A8397B1DCDAF."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    assert mix(gamma) == 0xE220A8397B1DCDAF
    keys = [(0, 0), (0, 1), (1, 0), (2**63 - 1, 8191), (123456789, 2**31)]
    expected = [
        (mix((mix((seed + gamma) % 2**64) + position * gamma) % 2**64) >> 11) / 2**53 for seed, position in keys
    ]
    assert sampling.uniforms(*zip(*keys, strict=True)).tolist() == expected


def test_random_numbers_are_even_and_differ_by_seed_and_position() -> None:
    numbers = sampling.uniforms([seed for seed in range(100) for _ in range(200)], list(range(200)) * 100)
    assert len(set(numbers.tolist())) == len(numbers)
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert abs(counts - 1000).max() < 150
    assert numbers.min() >= 0
    assert numbers.max() < 1


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    draws = 20_000
    rows = [a_row(Sampling(temperature=0.7, seed=5), position=position, num_prompt=1) for position in range(1, draws)]
    counts = np.bincount(chosen(logits.expand(len(rows), -1), *rows), minlength=4) / len(rows)
    assert counts == pytest.approx(torch.softmax(logits[0] / 0.7, 0).numpy(), abs=0.01)


def test_top_k_keeps_k_and_one_is_greedy() -> None:
    logits = random_logits(1)
    best = logits[0].topk(5).indices.tolist()
    assert support(logits, temperature=50.0, top_k=5) == set(best)
    assert support(logits, temperature=50.0, top_k=1) == {best[0]}
    assert len(support(logits, temperature=1e6, top_k=VOCAB_SIZE)) > 200
    assert len(support(logits, temperature=1e6, top_k=VOCAB_SIZE + 1)) > 200


@pytest.mark.parametrize("scale", [1.0, 0.01], ids=["within the candidates", "past the candidates"])
def test_top_p_keeps_the_fewest_that_reach_it(scale: float) -> None:
    logits = random_logits(1, vocab_size=4000) * scale
    probabilities = torch.softmax(logits[0].double(), 0)
    order = probabilities.argsort(descending=True)
    wanted = int((probabilities[order].cumsum(0) < 0.5).sum()) + 1
    weights = np.exp(logits[0].numpy() - logits[0].max().item())
    sampling._filter(weights, Sampling(temperature=1.0, top_p=0.5))
    assert set(np.flatnonzero(weights).tolist()) == set(order[:wanted].tolist())


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert support(logits, temperature=1.0, top_k=2, top_p=0.5) == {0}
    assert support(logits, temperature=1.0, top_k=3, top_p=0.5) == {0, 1}


def test_min_p_drops_the_unlikely_and_one_that_is_tiny_keeps_the_best() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.26, 0.2, 0.04]]))
    assert support(logits, temperature=1.0, min_p=0.5) == {0, 1}
    assert support(logits, temperature=1.0, top_p=1e-6) == {0}


def test_equally_likely_tokens_are_kept_together() -> None:
    assert support(torch.zeros(1, 4), temperature=1.0, top_k=2) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 0.01])
def test_sample_17_a_tiny_temperature_is_greedy_and_harms_nobody(temperature: float) -> None:
    logits = random_logits(3) * 100
    rows = [a_row(Sampling(temperature=0.8, seed=1)), a_row(Sampling(temperature=temperature)), a_row(Sampling())]
    alone = [chosen(logits[i : i + 1], row)[0] for i, row in enumerate(rows)]
    assert chosen(logits, *rows) == alone
    assert alone[1:] == logits[1:].argmax(1).tolist()


def test_sample_19_no_end_token_before_min_tokens() -> None:
    logits = random_logits(1)
    best, second, third = logits[0].topk(3).indices.tolist()
    stops = columns.pack([best, second, VOCAB_SIZE + 5])
    params = Sampling(min_tokens=5, stop_token_ids=stops)
    assert chosen(logits, a_row(params, position=14, num_prompt=10)) == [third]
    assert chosen(logits, a_row(params, position=15, num_prompt=10)) == [best]
    sampled = Sampling(temperature=1.0, top_k=1, min_tokens=5, stop_token_ids=stops)
    assert chosen(logits, a_row(sampled, position=14, num_prompt=10)) == [third]


def test_logits_that_are_not_finite_fail_their_row_alone() -> None:
    logits = random_logits(6)
    rows = [a_row(Sampling(temperature=float(i % 2), seed=i)) for i in range(6)]
    whole = chosen(logits, *rows)
    logits[1, 3] = float("nan")
    logits[2, :] = float("-inf")
    logits[4, 9] = float("inf")
    output = sampling.sample(logits.clone(), rows).read()
    assert output.failures.keys() == {1, 2, 4}
    assert [output.tokens[i] for i in (0, 3, 5)] == [whole[i] for i in (0, 3, 5)]


def test_everything_masked_is_a_failure_of_that_row() -> None:
    params = Sampling(min_tokens=1, stop_token_ids=columns.pack(range(VOCAB_SIZE)))
    assert sampling.sample(random_logits(2), [a_row(params), a_row(Sampling())]).read().failures.keys() == {0}


def test_no_samples_is_no_work() -> None:
    assert sampling.sample(torch.empty(0, VOCAB_SIZE), []).read().tokens == []


def test_sample_18_a_row_never_depends_on_its_neighbours() -> None:
    """3,000 rows of random parameters: each gives the same token and logprobs, to the bit, alone, in a pair, in its
    batch, and in the batch reversed."""
    draw = np.random.default_rng(7)
    vocab_size, size = 3001, 100
    for batch in range(30):
        logits = random_logits(size, seed=batch, vocab_size=vocab_size)
        rows = [a_random_row(draw, vocab_size) for _ in range(size)]
        together = told(logits, rows)
        assert told(logits.flip(0), rows[::-1]) == together[::-1]
        pairs = [told(logits[i : i + 2], rows[i : i + 2]) for i in range(0, size, 2)]
        assert [one for pair in pairs for one in pair] == together
        assert [told(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    assert sum(record is not None for _, record in together) > size // 3


def told(logits: torch.Tensor, rows: list[SampleRow]) -> list[tuple[int, bytes | None]]:
    """Each row's token and record."""
    output = sampling.sample(logits.clone(), rows).read()
    assert output.failures == {}
    return [(token, output.logprobs.get(i)) for i, token in enumerate(output.tokens)]


def a_random_row(draw: np.random.Generator, vocab_size: int) -> SampleRow:
    """Any parameters; two in five are plain greedy ones."""
    num_known, bias = int(draw.integers(1, 300)), draw.choice(vocab_size, int(draw.choice([0, 0, 3])), replace=False)
    params = Sampling(
        temperature=float(draw.choice([0.0, 0.3, 0.8, 1.0, 2.0])),
        top_k=int(draw.choice([0, 0, 1, 40, 2000])),
        top_p=float(draw.choice([1.0, 1.0, 0.9, 0.2])),
        min_p=float(draw.choice([0.0, 0.0, 0.05])),
        seed=int(draw.integers(2**62)),
        min_tokens=int(draw.choice([0, 0, 50])),
        stop_token_ids=columns.pack([2, vocab_size - 1]),
        repetition_penalty=float(draw.choice([1.0, 1.0, 1.2])),
        presence_penalty=float(draw.choice([0.0, 0.0, 0.7])),
        frequency_penalty=float(draw.choice([0.0, 0.0, -0.3])),
        bias_ids=columns.pack(bias.tolist()),
        bias_values=columns.pack_floats(draw.uniform(-100, 10, len(bias)).tolist()),
        num_logprobs=int(draw.choice([-1, 0, 5, 20])),
    )
    params = Sampling() if draw.random() < 0.4 else params
    known = draw.integers(0, vocab_size, num_known).astype(np.int32)
    return SampleRow(0, 0, 0, params, num_known, known, int(draw.integers(1, num_known + 1)), is_plain(params))


@pytest.mark.parametrize("num_logprobs", [0, 20])
def test_sample_21_logprobs_are_finite_and_of_the_raw_distribution(num_logprobs: int) -> None:
    """Filters and a bias of -100 on the best token change the choice, and none of its logprobs."""
    logits = random_logits(2)
    best, second = logits[0].topk(2).indices.tolist()
    bias = {"bias_ids": columns.pack([best]), "bias_values": columns.pack_floats([-100.0])}
    rows = [
        a_row(Sampling(temperature=1.0, top_k=1, num_logprobs=num_logprobs, **bias)),
        a_row(Sampling(temperature=1.0, top_p=1e-6, repetition_penalty=5.0, num_logprobs=num_logprobs)),
    ]
    output = sampling.sample(logits.clone(), rows).read()
    assert output.tokens[0] == second
    for i, token in enumerate(output.tokens):
        expected = torch.log_softmax(logits[i].double(), 0)
        values = np.frombuffer(output.logprobs[i], "<f4")
        assert values[0] == pytest.approx(expected[token].item(), rel=1e-6)
        assert values[1 + num_logprobs :].tolist() == pytest.approx(expected.topk(num_logprobs)[0].tolist(), rel=1e-6)
        assert np.isfinite(values[1 + num_logprobs :]).all()


def test_a_failed_row_tells_nothing_and_its_neighbour_all() -> None:
    logits = random_logits(2)
    rows = [a_row(Sampling(num_logprobs=1))] * 2
    alone = sampling.sample(logits[1:].clone(), rows[1:]).read().logprobs[0]
    logits[0, 5] = float("nan")
    output = sampling.sample(logits.clone(), rows).read()
    assert output.failures.keys() == {0}
    assert output.logprobs == {1: alone}


def a_mask(*allowed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    mask = np.zeros(VOCAB_SIZE, np.uint8)
    mask[list(allowed)] = 1
    return np.packbits(mask, bitorder="little")


CONSTRAINED = Sampling(temperature=1.0, constraint=Constraint("regex", "a"), num_logprobs=2)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_mask_touches_its_row_alone(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    if on_device:
        monkeypatch.setattr(sampling, "_forbid", sampling._forbid_on_device)
    logits = random_logits(40)
    plain = [a_row(Sampling(temperature=0.7, num_logprobs=2, seed=i)) for i in range(40)]
    alone = sampling.sample(logits.clone(), plain).read()
    rows = [a_row(CONSTRAINED) if i % 3 == 0 else row for i, row in enumerate(plain)]
    allowed = {i: a_mask(i, i + 100, i + 200) for i in range(0, 40, 3)}
    output = sampling.sample(logits.clone(), rows, masks=Masks(allowed)).read()
    for i in range(40):
        if i % 3:
            assert (output.tokens[i], output.logprobs[i]) == (alone.tokens[i], alone.logprobs[i])
        else:
            assert output.tokens[i] in (i, i + 100, i + 200)
            assert output.logprobs[i][4:] == alone.logprobs[i][4:], "the most likely of all tokens, allowed or not"
    assert not output.failures


def test_a_mask_comes_after_penalties_and_where_only_an_end_fits_it_comes() -> None:
    held_back = Sampling(
        constraint=Constraint("regex", "a"),
        min_tokens=99,
        stop_token_ids=columns.pack([5, 6]),
        bias_ids=columns.pack([5, 7]),
        bias_values=columns.pack_floats([-1e9, 50.0]),
    )
    rows = [a_row(held_back)] * 3
    masks = Masks({0: a_mask(5, 6, 7), 1: a_mask(5), 2: a_mask(5)}, ended={1})
    output = sampling.sample(random_logits(3), rows, masks=masks).read()
    assert output.tokens[:2] == [7, 5]
    assert list(output.failures) == [2]
    assert "constraint" in output.failures[2]


def test_rows_without_a_mask_yet_have_no_token() -> None:
    rows = [a_row(CONSTRAINED)] * 3
    output = sampling.sample(random_logits(3), rows, masks=Masks({0: a_mask(3)}, failures={1: "no"}, late={2})).read()
    assert (output.tokens[0], output.failures, output.late) == (3, {1: "no"}, {2})
    assert list(output.logprobs) == [0]
