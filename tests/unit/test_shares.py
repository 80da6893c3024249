"""How prefills share a step."""

from services.scheduler.core.cost import StepCost, chunk_reads
from services.scheduler.core.request import Rank
from services.scheduler.core.shares import Budget, Prefill, cut, share_out


def prefill(ticket, remaining, start=0, priority=0):
    return Prefill(Rank(priority, 1, ticket), None, None, start, remaining)


def budget(max_rows, rows=0, reads=0, cost=None, budget_us=100_000):
    return Budget(cost or StepCost(), rows, reads, max_rows, budget_us)


def shares(prefills, left, block_size=16):
    return {share.prefill.rank.ticket: share.num_tokens for share in share_out(prefills, left, block_size)}


def taught(base, row, read):
    cost = StepCost()
    for i in range(64):
        rows, context = 1 + i * 7 % 64, 16 + i * 37 % 2048
        cost.measure(
            rows, chunk_reads(context, rows), round(base + row * rows + read * chunk_reads(context, rows)), rows > 8
        )
    return cost


def test_one_prefill_gets_all_it_wants_or_all_there_is():
    assert shares([prefill(1, 100)], budget(512)) == {1: 100}
    assert shares([prefill(1, 1000)], budget(512)) == {1: 512}


def test_several_share_the_budget_shortest_first():
    assert shares([prefill(1, 30), prefill(2, 20), prefill(3, 10)], budget(64)) == {1: 30, 2: 20, 3: 10}


def test_the_oldest_keeps_a_quarter():
    assert shares([prefill(1, 8000), prefill(2, 400), prefill(3, 400)], budget(512)) == {1: 128, 2: 384}


def test_the_oldest_gets_more_than_a_quarter_when_it_is_left():
    assert shares([prefill(1, 8000), prefill(2, 100)], budget(512)) == {1: 400, 2: 100}


def test_the_most_urgent_counts_as_the_oldest():
    assert shares([prefill(1, 400), prefill(2, 8000, priority=-1)], budget(512)) == {1: 384, 2: 128}


def test_chunks_end_on_block_boundaries_unless_final_or_the_budget_is_small():
    assert cut(0, 100, 50, 16) == 48
    assert cut(5, 100, 50, 16) == 43
    assert cut(0, 50, 50, 16) == 50
    assert cut(0, 100, 7, 16) == 7
    assert cut(16, 100, 0, 16) == 0


def test_decodes_come_off_the_budget_first():
    assert shares([prefill(1, 100)], budget(64, rows=32)) == {1: 32}
    assert shares([prefill(1, 100)], budget(32, rows=32)) == {}


def test_the_budget_bounds_predicted_time_too():
    cost = taught(10_000, 100, 0.2)
    near = shares([prefill(1, 4000)], budget(4000, cost=cost))[1]
    far = shares([prefill(1, 4000, start=8000)], budget(4000, cost=cost))[1]
    assert 10_000 + cost.chunk_us(near, chunk_reads(0, near)) < 101_000
    assert far < near / 5


def test_decodes_that_fill_the_time_leave_the_oldest_a_block():
    cost = taught(10_000, 2_000, 0.2)
    assert shares([prefill(1, 4000), prefill(2, 4000)], budget(512, rows=64, reads=6400, cost=cost)) == {1: 16}


def test_a_model_whose_weights_alone_take_longer_than_the_budget_is_not_fed_a_block_at_a_time():
    cost = taught(1_000_000, 20_000, 0.2)
    one_decode = budget(512, rows=1, reads=100, cost=cost)
    assert shares([prefill(1, 4000)], one_decode) == {1: 48}  # 48 rows cost as much as the base, near enough
    many_decodes = budget(512, rows=64, reads=6400, cost=cost)
    assert shares([prefill(1, 4000)], many_decodes) == {1: 16}
