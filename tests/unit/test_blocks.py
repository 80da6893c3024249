"""Blocks are taken and given back, and the books add up."""

import pytest

from services.scheduler.core.blocks import BlockPool, blocks_for


def test_all_blocks_are_free_at_first_and_come_in_order():
    pool = BlockPool(5)
    assert pool.num_free == 5
    assert pool.take(3) == [0, 1, 2]
    assert pool.holders == [1, 1, 1, 0, 0]


def test_a_table_is_let_go_of_from_its_end_and_what_came_last_is_taken_first():
    pool = BlockPool(5)
    pool.take(5)
    pool.give_back([3, 1])
    assert pool.take(2) == [3, 1]


def test_a_block_is_free_once_nobody_holds_it():
    pool = BlockPool(2)
    pool.take(1)
    pool.holders[0] = 2
    pool.give_back([0])
    assert pool.num_free == 1
    pool.give_back([0])
    assert pool.num_free == 2


def test_giving_back_twice_or_taking_too_many_is_our_bug():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.give_back([0])
    with pytest.raises(AssertionError, match="3 blocks are wanted and 2 are available"):
        pool.take(3)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for(num_tokens, blocks):
    assert blocks_for(num_tokens, 16) == blocks
