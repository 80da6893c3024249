"""The step-time model: it learns what it is shown, and predicts nothing before it has seen enough."""

import pytest

from services.scheduler.core.cost import FIRST_FIT, StepCost, chunk_reads


def taught(base, row, read, steps=64):
    cost = StepCost()
    for i in range(steps):
        rows, context = 1 + i * 7 % 64, 16 + i * 37 % 2048
        reads = chunk_reads(context, rows)
        cost.measure(rows, reads, round(base + row * rows + read * reads), rows > 8)
    return cost


def test_nothing_is_predicted_at_first():
    cost = taught(1000, 10, 0.1, steps=FIRST_FIT - 1)
    assert not cost.fitted
    assert cost.step_us(100, 100_000) == 0


def test_a_linear_cost_is_found_again():
    cost = taught(15_000, 300, 0.25)
    assert cost.fitted
    assert cost.base_us == pytest.approx(15_000, rel=0.02)
    assert cost.row_us == pytest.approx(300, rel=0.02)
    assert cost.read_us == pytest.approx(0.25, rel=0.02)


def test_no_coefficient_is_negative():
    cost = StepCost()
    for i in range(64):
        cost.measure(1 + i % 8, (1 + i % 8) * 100, 5000 - 100 * (i % 8), False)
    assert min(cost.base_us, cost.row_us, cost.read_us) >= 0


def test_steps_that_are_all_alike_do_not_confuse_it():
    cost = StepCost()
    for _ in range(64):
        cost.measure(4, 400, 8000, False)
    assert cost.step_us(4, 400) == pytest.approx(8000, rel=0.01)


def test_it_forgets_a_machine_that_has_changed():
    cost = taught(15_000, 300, 0.25)
    for i in range(2000):
        rows = 1 + i * 7 % 64
        cost.measure(rows, chunk_reads(100, rows), 1000 + 10 * rows, rows > 8)
    assert cost.step_us(32, chunk_reads(100, 32)) == pytest.approx(1320, rel=0.1)


def test_a_machine_that_paused_is_no_property_of_a_step():
    cost = taught(15_000, 300, 0.25, steps=256)
    before_us = cost.step_us(8, 8000)
    cost.measure(8, 8000, 60_000_000, False)
    for _ in range(16):
        cost.measure(8, 8000, 19_400, False)
    assert cost.step_us(8, 8000) == pytest.approx(before_us, rel=0.05)
    assert cost.recent_us < 4 * before_us


def test_a_pause_among_the_first_steps_is_soon_forgotten():
    cost = StepCost()
    cost.measure(8, 8000, 60_000_000, False)
    for _ in range(3 * FIRST_FIT):
        cost.measure(8, 8000, 19_400, False)
    assert cost.step_us(8, 8000) == pytest.approx(19_400, rel=0.05)


def test_a_machine_that_has_become_ten_times_slower_is_believed():
    cost = taught(15_000, 300, 0.25)
    for i in range(1000):
        rows = 1 + i * 7 % 64
        cost.measure(rows, chunk_reads(100, rows), 10 * (15_000 + 300 * rows), rows > 8)
    assert cost.step_us(32, chunk_reads(100, 32)) == pytest.approx(246_000, rel=0.15)


def test_the_price_of_a_prefill_outlasts_many_steps_without_one():
    cost = taught(15_000, 300, 0.25)
    for i in range(20_000):
        reads = 8 * (100 + i % 200)
        cost.measure(8, reads, round(15_000 + 300 * 8 + 0.25 * reads), False)
    assert cost.chunk_us(100, chunk_reads(0, 100)) == pytest.approx(31_262, rel=0.05)


def test_most_rows_is_the_most():
    cost = taught(0, 100, 1.0)
    for start in (0, 10, 1000):
        for left_us in (0, 150, 5_000, 60_000):
            most = cost.most_rows(start, 64, left_us)
            assert most == 64 or cost.chunk_us(most + 1, chunk_reads(start, most + 1)) > left_us
            assert most == 0 or cost.chunk_us(most, chunk_reads(start, most)) <= left_us


def test_a_chunk_behind_much_context_is_dearer():
    cost = taught(1000, 100, 0.5)
    assert cost.most_rows(8000, 512, 50_000) < cost.most_rows(0, 512, 50_000) / 3


def test_chunk_reads_sums_each_row_s_context():
    assert chunk_reads(10, 3) == 11 + 12 + 13
