"""A fit predicts the steps it was made of, whatever their shape; a busy machine's outliers do not count."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from services.scheduler.core.actions import ToGateway
from services.scheduler.core.events import Submitted, TimePassed
from services.scheduler.core.limits import Settings
from services.scheduler.journal import Journal
from shared.wire.facts import ExecutorLimits
from shared.wire.gateway import Delta, Submit, Tokens
from shared.wire.sampling import Sampling
from tests.unit.test_journal import WORDS, Recorded
from tools.simulator.costs import Costs, FitError, Measured, Shape, _Turns, fit, fit_steps, trimmed_mean


def cpu_us(shape: Shape) -> float:
    """Eight rows cost what one does, then each costs more; the rows of a chunk read together, and few sample."""
    rows_us = 15_000 + 420 * max(0, shape.rows - 8) + 200 * shape.samples
    return rows_us + 0.4 * shape.decode_reads + 0.1 * shape.chunk_reads


def decodes(rows: int, context: int) -> Shape:
    return Shape(rows, rows, rows * context, 0)


def chunk(rows: int, context: int) -> Shape:
    return Shape(rows, 0, 0, rows * context)


def both(one: Shape, other: Shape) -> Shape:
    return Shape(*map(sum, zip(one, other, strict=True)))


def measured(chance: random.Random, noise: float) -> list[Measured]:
    """Decodes, most of them alone."""
    steps = []
    for _ in range(600):
        shape = decodes(chance.choice([1, 2, 4, 8, 12, 16, 24, 32, 64]), chance.randint(1, 2000))
        if chance.random() < 0.3:
            shape = both(shape, chunk(chance.choice([16, 64, 100, 128, 256]), chance.randint(1, 2000)))
        slow = 3.0 if chance.random() < 0.05 else 1.0
        steps.append(Measured(shape, round(cpu_us(shape) * slow * chance.uniform(1 - noise, 1 + noise))))
    return steps


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_is_within_a_few_percent(seed: int) -> None:
    costs = fit_steps(measured(random.Random(seed), noise=0.03))
    for context in (10, 500, 1500):
        alone = [decodes(rows, context) for rows in (1, 4, 8, 16, 32, 64)]
        for shape in alone + [both(decodes(8, context), chunk(rows, context)) for rows in (16, 32, 64, 128, 256)]:
            assert costs.step_us(shape) == pytest.approx(cpu_us(shape), rel=0.08)


@pytest.mark.parametrize("seed", range(3))
def test_decodes_and_chunks_have_prices_of_their_own(seed: int) -> None:
    costs = fit_steps(measured(random.Random(seed), noise=0.03))
    assert costs.sample_us == pytest.approx(200, rel=0.25)
    assert costs.read_us == pytest.approx(0.4, rel=0.1)
    assert costs.chunk_read_us == pytest.approx(0.1, rel=0.25)


@pytest.mark.parametrize("shape_of", [decodes, chunk])
def test_steps_of_one_kind_leave_one_price_for_both(shape_of: Callable[[int, int], Shape]) -> None:
    """What was never measured is no cheaper than what was."""
    chance = random.Random(5)
    shapes = [shape_of(chance.randint(1, 64), chance.randint(1, 2000)) for _ in range(200)]
    costs = fit_steps([Measured(shape, round(cpu_us(shape))) for shape in shapes])
    assert (costs.sample_us, costs.chunk_read_us) == (0.0, costs.read_us)


def test_more_rows_never_cost_less() -> None:
    costs = fit_steps(measured(random.Random(7), noise=0.3))
    assert list(costs.knots_us) == sorted(costs.knots_us)
    assert list(costs.knots) == sorted(set(costs.knots))


def test_a_line_is_a_line() -> None:
    costs = Costs.line(1000, 10, 0.5, 0, 0)
    assert costs.step_us(Shape(5, 5, 100, 0)) == costs.step_us(Shape(5, 1, 40, 60)) == 1100
    assert costs.step_us(Shape(5000, 0, 0, 0)) == 51_000


def test_too_few_steps_are_no_fit() -> None:
    with pytest.raises(FitError, match="3 steps"):
        fit_steps([Measured(decodes(1, 1), 1)] * 3)


def test_all_steps_alike_are_a_fit() -> None:
    assert fit_steps([Measured(decodes(1, 0), 5000)] * 30).step_us(decodes(1, 0)) == 5000


def test_pauses_do_not_count() -> None:
    assert trimmed_mean([1.0] * 18 + [0.0, 10_000.0]) == 1.0
    assert trimmed_mean([]) == 0.0


def test_a_closed_loop_tells_how_long_clients_take(tmp_path: Path) -> None:
    """Four clients, each sends again 7 ms after its answer; with half of the answers never followed nothing is told."""
    for client_ms, num_submits, expected_us in ((7, 40, 7000), (7, 5, 0)):
        turns = _Turns()
        ended = ToGateway("g", Tokens([Delta("r", b"", "length")]))
        for number in range(4):
            turns.observe(Submitted("g", Submit("r", b"", Sampling(), 1)), number, [])
        for number in range(num_submits):
            turns.observe(TimePassed(), 100 * number, [ended])
            if num_submits > 5 or number < 1:
                turns.observe(Submitted("g", Submit("r", b"", Sampling(), 1)), 100 * number + client_ms, [])
        assert turns.client_us() == expected_us


def test_a_journal_tells_the_cost_of_its_steps(tmp_path: Path) -> None:
    world = Recorded(Settings(), WORDS)
    world.journal = Journal(tmp_path / "j", world.scheduler)
    gateway = world.join_gateway()
    world.join_executor(ExecutorLimits(40, 4, 4, 16))
    for i in range(12):
        world.submit(gateway, [100 + i] * (1 + 2 * i), 20, seed=i)
        world.drain()
    world.journal.close()
    fitted = fit(tmp_path / "j", link_us=5)
    costs = fitted.costs
    # What tests.fakes.model_executor makes up: 1500 + 700 a row + 50 a read.
    assert costs.step_us(decodes(1, 20)) == pytest.approx(1500 + 700 + 50 * 20, rel=0.1)
    assert costs.link_us == 5
    assert fitted.limits == ExecutorLimits(40, 4, 4, 16)
    assert costs.client_us == 0, "everybody is drained before the next one comes"
