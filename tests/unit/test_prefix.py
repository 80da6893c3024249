"""Chains of tokens are found by their tokens, in their own namespace; what nobody holds is given up end first."""

import pytest

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.directory import Directory, Namespace
from services.scheduler.core.prefix import Prefixes, Search
from shared.wire import tokens

ME: Namespace = ("", "")
SIZE = 4


class Bench:
    """A pool with its cache, and tables in it."""

    def __init__(self, num_blocks: int = 8, executor_id: str = "e", directory: Directory | None = None) -> None:
        self.directory = directory or Directory()
        self.prefixes = Prefixes(num_blocks, SIZE, executor_id, self.directory)
        self.pool = BlockPool(num_blocks, self.prefixes)

    def table(self, token_ids: list[int], namespace: Namespace = ME) -> list[int]:
        """A table for all tokens, its full blocks computed and published."""
        found = self.match(token_ids, namespace)
        self.pool.hold(found)
        table = found + self.pool.take(-(-len(token_ids) // SIZE) - len(found))
        for index in range(len(found), len(token_ids) // SIZE):
            column = tokens.pack(token_ids[index * SIZE : (index + 1) * SIZE])
            assert self.prefixes.publish([table[index]], table[index - 1] if index else namespace, column)
        return table

    def match(self, token_ids: list[int], namespace: Namespace = ME) -> list[int]:
        return list(Search(namespace, tokens.pack(token_ids)).blocks_in(self.prefixes))


def ids(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


def test_a_match_is_the_longest_equal_chain():
    bench = Bench()
    table = bench.table(ids(13))
    assert bench.match(ids(13)) == table[:3]
    assert bench.match([*ids(8), 99, 99, 99, 99, 99]) == table[:2]
    assert bench.match([*ids(7), 99, 99, 99]) == table[:1]
    assert bench.match([99, *ids(12)]) == []
    assert bench.match(ids(4, 4)) == [], "the same block elsewhere is another chain"


@pytest.mark.parametrize(("num_tokens", "blocks"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_cache_31_a_token_is_left_to_compute(num_tokens, blocks):
    bench = Bench()
    bench.table(ids(12))
    assert len(bench.match(ids(num_tokens))) == blocks


@pytest.mark.parametrize("other", [("a", ""), ("", "a")])
def test_namespaces_share_nothing(other):
    bench = Bench()
    bench.table(ids(9))
    assert bench.match(ids(9), other) == []
    bench.table(ids(9), other)
    assert len(bench.prefixes) == 4


def test_equal_checksums_are_no_match(monkeypatch):
    """Whatever the directory's checksums say: a match compares tokens."""
    monkeypatch.setattr("services.scheduler.core.directory.crc32", lambda data, before=0: 7)
    bench = Bench()
    bench.table(ids(9))
    assert bench.match(ids(9, 50)) == []


def test_what_nobody_holds_stays_until_free_blocks_run_short():
    bench = Bench(num_blocks=4)
    table = bench.table(ids(9))
    bench.pool.give_back(table)
    assert (bench.pool.num_free, bench.pool.num_cached, bench.pool.num_available) == (2, 2, 4)
    assert bench.match(ids(9)) == table[:2]
    assert set(bench.pool.take(2)) == set(range(4)) - set(table[:2]), "free ones first"
    assert bench.pool.take(1) == [table[1]], "then the end of the chain"
    assert bench.match(ids(9)) == table[:1]
    bench.pool.take(1)
    assert bench.match(ids(9)) == []
    assert len(bench.prefixes) == 0


def test_the_chain_let_go_of_longest_ago_is_given_up_first_children_before_parents():
    bench = Bench(num_blocks=8)
    first = bench.table(ids(9))
    second = bench.table(ids(9, 100))
    bench.pool.give_back(first)
    bench.pool.give_back(second)
    again = bench.table(ids(9))
    assert again[:2] == first[:2]
    bench.pool.give_back(again)
    assert bench.pool.cached_blocks() == [second[1], second[0], first[1], first[0]]


def test_a_parent_shared_with_others_outlives_its_children():
    bench = Bench(num_blocks=8)
    one = bench.table([*ids(4), *ids(4, 20), 0])
    two = bench.table([*ids(4), *ids(4, 40), 0])
    assert one[0] == two[0]
    assert bench.pool.holders[one[0]] == 2
    bench.pool.give_back(one)
    assert bench.pool.cached_blocks() == [one[1]]
    bench.pool.give_back(two)
    assert bench.pool.cached_blocks() == [one[1], two[1], one[0]]


def test_the_same_chain_twice_is_published_once():
    bench = Bench()
    bench.table(ids(5))
    (block,) = bench.pool.take(1)
    assert not bench.prefixes.publish([block], ME, tokens.pack(ids(4)))
    bench.pool.give_back([block])
    assert bench.pool.num_cached == 0


def test_cache_30_what_was_found_is_held_before_anybody_takes_a_block():
    """One cached block X: A finds it and holds it, B takes all that is left and does not get X."""
    bench = Bench(num_blocks=4)
    (x,) = bench.table(ids(4))
    bench.pool.give_back([x])
    found = bench.match(ids(5))
    bench.pool.hold(found)
    assert found == [x]
    taken = bench.pool.take(bench.pool.num_available)
    assert sorted([x, *taken]) == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="0 are available"):
        bench.pool.take(1)


def test_a_search_is_brought_up_to_date_and_not_begun_again():
    bench = Bench(num_blocks=6)
    search = Search(ME, tokens.pack(ids(13)))
    assert search.blocks_in(bench.prefixes) == []
    table = bench.table(ids(8))
    assert search.blocks_in(bench.prefixes) == table
    bench.pool.give_back(table)
    bench.pool.take(5)
    assert search.blocks_in(bench.prefixes) == table[:1]
    bench.pool.take(1)
    assert search.blocks_in(bench.prefixes) == []


def test_a_block_that_has_become_another_chain_is_not_what_was_found():
    """Its number, its tokens and its predecessor's number are what they were; the chain is not."""
    bench = Bench(num_blocks=2)
    search = Search(ME, tokens.pack(ids(9)))
    table = bench.table(ids(8))
    assert search.blocks_in(bench.prefixes) == table
    bench.pool.give_back(table)
    assert bench.pool.take(2) == [table[1], table[0]]
    bench.pool.give_back(table)
    again = bench.table([*ids(4, 70), *ids(4, 4)])
    assert again == table
    assert search.blocks_in(bench.prefixes) == []


def test_what_was_found_before_an_executor_said_hello_again_is_not_found_after():
    """Stamps begin anew with the cache, and the pool may be smaller."""
    before = Bench(num_blocks=8)
    search = Search(ME, tokens.pack(ids(9)))
    table = before.table(ids(8))
    assert search.blocks_in(before.prefixes) == table
    before.prefixes.forget_all()
    after = Bench(num_blocks=2, directory=before.directory)
    assert search.blocks_in(after.prefixes) == []
    after.table(ids(8, 50))
    assert search.blocks_in(after.prefixes) == []


def test_the_directory_knows_who_published_the_longest_chain_last():
    directory = Directory()
    one, two = Bench(executor_id="one", directory=directory), Bench(executor_id="two", directory=directory)
    column = tokens.pack(ids(13))

    def deepest() -> str | None:
        return directory.deepest(ME, column, tokens.ITEM_BYTES)

    assert deepest() is None
    table = one.table(ids(9))
    assert deepest() == "one"
    two.table(ids(13))
    assert deepest() == "two"
    assert directory.deepest(("a", ""), column, tokens.ITEM_BYTES) is None
    two.prefixes.forget_all()
    assert deepest() is None, "whoever held it before is forgotten with the last one"
    one.pool.give_back(table)
    one.pool.take(8)
    assert deepest() is None
    assert directory._owners == {}
