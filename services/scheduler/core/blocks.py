"""The blocks of one executor: which are free, and how many tables hold each of the others.

Called by ``lanes`` only. A block counts its holders, so that tables may come to share blocks; today each has one.
Blocks are given back the instant a request retires, while steps that still read them are in flight. That is safe: an
executor applies plans in order, so those steps run before the plan that gives a block to somebody else.
"""

from collections.abc import Iterable


class BlockPool:
    """Blocks 0..num_blocks-1. The block given back last is taken first: it is the likeliest to be in a cache."""

    __slots__ = ("_free", "holders", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holders = [0] * num_blocks
        """Number of tables that hold each block."""
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks in no table."""
        return len(self._free)

    def free_blocks(self) -> list[int]:
        """A copy, for checks."""
        return list(self._free)

    def take(self, count: int) -> list[int]:
        """Take ``count`` free blocks; the caller knows that there are as many."""
        assert 0 <= count <= len(self._free), f"{count} blocks are wanted and {len(self._free)} are free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self.holders[block] = 1
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """One table lets go of ``blocks``; those that no other holds are free."""
        for block in blocks:
            assert self.holders[block] > 0, f"block {block} is given back and nobody holds it"
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self._free.append(block)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)
