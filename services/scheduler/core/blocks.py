"""The blocks of one executor: how many tables hold each, which hold nothing of use, and which are only kept in case.

Called by ``lanes`` and ``planner``. A block is *in use* while a table holds it; else it is *free*, or *cached* if it is
published in the prefix cache. Free blocks are taken first, then the cached ones nobody has held for longest: a table is
let go of from its end, and whoever holds a block holds all before it, so the blocks at the ends of chains always go
first.

Blocks are given back the instant a request retires, while steps that still read them are in flight. That is safe: an
executor applies plans in order, so those steps run before the plan that gives a block to somebody else.
"""

from collections.abc import Sequence

from services.scheduler.core.prefix import Prefixes


class BlockPool:
    """Blocks 0..num_blocks-1. The block given back last is taken first: it is the likeliest to be in a cache."""

    __slots__ = ("_free", "_idle", "holders", "num_blocks", "prefixes")

    def __init__(self, num_blocks: int, prefixes: Prefixes | None = None) -> None:
        self.num_blocks = num_blocks
        self.prefixes = prefixes
        """None without a prefix cache."""
        self.holders = [0] * num_blocks
        """Number of tables that hold each block."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle = Idle(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks in no table that hold nothing of use."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks in no table that a match may still find."""
        return self._idle.count

    @property
    def num_available(self) -> int:
        """Blocks in no table: what may be taken."""
        return len(self._free) + self._idle.count

    def free_blocks(self) -> list[int]:
        """A copy, for checks."""
        return list(self._free)

    def cached_blocks(self) -> list[int]:
        """A copy in the order in which they would be given up, for checks."""
        return self._idle.blocks()

    def take(self, count: int) -> list[int]:
        """Take ``count`` blocks for one table; the caller knows that there are as many."""
        assert 0 <= count <= self.num_available, f"{count} blocks are wanted and {self.num_available} are available"
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self.holders[block] = 1
        return taken

    def _evict(self) -> int:
        assert self.prefixes is not None, "a block is cached without a cache"
        block = self._idle.pop()
        self.prefixes.forget(block)
        return block

    def hold(self, blocks: Sequence[int]) -> None:
        """One more table holds these published blocks."""
        holders = self.holders
        for block in blocks:
            if not holders[block]:
                self._idle.remove(block)
            holders[block] += 1

    def give_back(self, table: Sequence[int]) -> None:
        """A table lets go of its blocks, from its end; those that no other holds are cached or free."""
        holders, prefixes = self.holders, self.prefixes
        for block in reversed(table):
            assert holders[block] > 0, f"block {block} is given back and nobody holds it"
            holders[block] -= 1
            if not holders[block]:
                if prefixes is not None and block in prefixes:
                    self._idle.push(block)
                else:
                    self._free.append(block)


class Idle:
    """Blocks in the order in which they were let go of: a ring linked through two lists, so that all is O(1)."""

    __slots__ = ("_newer", "_older", "count")

    def __init__(self, num_blocks: int) -> None:
        self._newer = [num_blocks] * (num_blocks + 1)
        self._older = [num_blocks] * (num_blocks + 1)
        """Both ends of the ring are at index ``num_blocks``."""
        self.count = 0

    def push(self, block: int) -> None:
        """Add a block as the newest."""
        newer, older, end = self._newer, self._older, len(self._newer) - 1
        newest = older[end]
        newer[newest], older[block] = block, newest
        newer[block], older[end] = end, block
        self.count += 1

    def remove(self, block: int) -> None:
        """Take a block out, wherever it is."""
        newer, older = self._newer[block], self._older[block]
        self._newer[older], self._older[newer] = newer, older
        self.count -= 1

    def pop(self) -> int:
        """Take the oldest out."""
        assert self.count, "there is no idle block"
        block = self._newer[-1]
        self.remove(block)
        return block

    def blocks(self) -> list[int]:
        """All, the oldest first."""
        blocks, block = [], self._newer[-1]
        while block < len(self._newer) - 1:
            blocks.append(block)
            block = self._newer[block]
        return blocks


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)
