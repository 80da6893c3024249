import itertools
import random

import pytest

from tools.bench.workload import Calibration, Lengths, arrivals, jobs, words


@pytest.mark.parametrize(
    ("text", "low", "high"), [("64", 64, 64), ("16:128", 16, 128), ("exp:50", 1, 500), ("exp:50:80", 1, 80)]
)
def test_lengths_stay_in_their_range_and_reach_its_ends(text: str, low: int, high: int) -> None:
    chance = random.Random(1)
    drawn = [Lengths.parse(text).draw(chance) for _ in range(20_000)]
    assert low <= min(drawn) <= max(drawn) <= high
    if text == "16:128":
        assert (min(drawn), max(drawn)) == (16, 128)
        assert sum(drawn) / len(drawn) == pytest.approx(72, rel=0.02)
    if text == "exp:50":
        assert sum(drawn) / len(drawn) == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize("text", ["", "0", "-4", "9:3", "1:2:3", "exp", "exp:0", "exp:9:3", "ten", "1.5", "normal:3"])
def test_what_is_no_distribution(text: str) -> None:
    with pytest.raises(ValueError, match=r"is none of|must hold"):
        Lengths.parse(text)


async def test_calibration_finds_the_words_for_a_number_of_tokens() -> None:
    async def count_tokens(prompt: str) -> int:
        return 30 + 2 * len(prompt.split())

    calibration = await Calibration.of(count_tokens, random.Random(0))
    assert [calibration.words_for(tokens) for tokens in (130, 31, 1)] == [50, 1, 1]


def test_the_same_seed_gives_the_same_load_and_another_one_another() -> None:
    def load(seed: int) -> list[object]:
        calibration, lengths = Calibration(0, 1), Lengths.parse("5:50")
        return list(itertools.islice(jobs(seed, calibration, lengths, lengths), 20))

    assert load(3) == load(3)
    assert load(3) != load(4)


def test_prompts_do_not_begin_alike() -> None:
    chance = random.Random(0)
    assert len({words(20, chance)[:30] for _ in range(200)}) == 200


def test_arrivals_come_at_the_rate_and_as_irregularly_as_a_poisson_process() -> None:
    times = list(itertools.islice(arrivals(0, 20.0), 10_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.1)
