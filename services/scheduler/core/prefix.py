"""The prefix cache of one executor: which of its blocks hold a known chain of tokens.

A *chain* is a namespace and the tokens of consecutive full blocks from position 0 on. A published block is found by the
block before it and its own tokens, so a match is exact: equal tokens, block by block, from the start. Nothing is looked
up by a hash alone. Only blocks that are full, computed and confirmed are ever published (``Executor.publish``).

A block's predecessor is published as long as it is: whoever holds a block of a chain holds all before it, and
``BlockPool`` gives children up first. Called by ``blocks`` and ``lanes``.
"""

from services.scheduler.core.directory import Directory, Namespace, next_chain, root_chain
from shared.wire import tokens

Key = tuple[int | Namespace, bytes]
"""The block before (the namespace for a first block) and a column of the block's tokens."""
UNPUBLISHED = 0


class Prefixes:
    """The published blocks of one executor."""

    __slots__ = (
        "_block_bytes",
        "_block_size",
        "_blocks",
        "_chains",
        "_directory",
        "_executor_id",
        "_keys",
        "_next_stamp",
        "_stamps",
        "number",
    )

    def __init__(self, num_blocks: int, block_size: int, executor_id: str, directory: Directory) -> None:
        self.number = directory.cache_number()
        self._executor_id = executor_id
        self._directory = directory
        self._block_size = block_size
        self._block_bytes = block_size * tokens.ITEM_BYTES
        self._blocks: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * num_blocks
        self._chains = [0] * num_blocks
        """Checksum of the chain that ends with each published block."""
        self._stamps = [UNPUBLISHED] * num_blocks
        """Number of the publication of each block: tells whether a block is still what it was when it was found."""
        self._next_stamp = UNPUBLISHED + 1

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return self._stamps[block] != UNPUBLISHED

    def key(self, block: int) -> Key | None:
        """What a block is found by; None for one that is not published."""
        return self._keys[block]

    def find(self, key: Key) -> int | None:
        """The block that is found by ``key``."""
        return self._blocks.get(key)

    def publish(self, blocks: list[int], before: int | Namespace, column: bytes) -> int:
        """Make blocks findable that follow ``before`` (a published block, or the namespace) and hold ``column``.

        Stops before one whose key another block is found by already; returns how many were published.
        """
        num_bytes, found, stamps = self._block_bytes, self._blocks, self._stamps
        chain = self._chains[before] if isinstance(before, int) else root_chain(before)
        for index, block in enumerate(blocks):
            tokens_of = column[index * num_bytes : (index + 1) * num_bytes]
            key = (before, tokens_of)
            if found.setdefault(key, block) != block:
                return index
            assert stamps[block] == UNPUBLISHED, f"block {block} is published twice"
            self._chains[block] = chain = next_chain(chain, tokens_of)
            self._keys[block] = key
            stamps[block] = self._next_stamp
            self._next_stamp += 1
            self._directory.publish(self._block_size, chain, self._executor_id)
            before = block
        return len(blocks)

    def forget(self, block: int) -> None:
        """Nobody finds a block any more."""
        key = self._keys[block]
        assert key is not None, f"block {block} is not published"
        del self._blocks[key]
        self._keys[block] = None
        self._stamps[block] = UNPUBLISHED
        self._directory.withdraw(self._block_size, self._chains[block], self._executor_id)

    def forget_all(self) -> None:
        """The executor is gone."""
        for block in list(self._blocks.values()):
            self.forget(block)

    def extend(self, match: "Match", namespace: Namespace, column: bytes) -> None:
        """Bring a match up to date: cut what was given up since, add what was published since.

        At least one token of the column is left over. The cost is that of what has changed, not of the column.
        """
        blocks, stamps = match.blocks, match.stamps
        while blocks and self._stamps[blocks[-1]] != stamps[-1]:  # what is before the last is as good as the last
            blocks.pop()
            stamps.pop()
        end = (len(blocks) + 1) * self._block_bytes
        while end < len(column):
            before = blocks[-1] if blocks else namespace
            block = self._blocks.get((before, column[end - self._block_bytes : end]))
            if block is None:
                return
            blocks.append(block)
            stamps.append(self._stamps[block])
            end += self._block_bytes


class Match:
    """The leading blocks of one waiting request that one cache had when last asked."""

    __slots__ = ("blocks", "stamps")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.stamps: list[int] = []


class Search:
    """What one waiting request has found so far, by cache, so that each tick asks only for what has changed."""

    __slots__ = ("_matches", "column", "namespace")

    def __init__(self, namespace: Namespace, column: bytes) -> None:
        """``column`` holds all of the request's tokens."""
        self.namespace = namespace
        self.column = column
        self._matches: dict[int, Match] = {}
        """By ``Prefixes.number``: stamps mean nothing to another cache."""

    def blocks_in(self, prefixes: Prefixes) -> list[int]:
        """The longest chain of published blocks that holds the first tokens; read only."""
        match = self._matches.get(prefixes.number)
        if match is None:
            match = self._matches[prefixes.number] = Match()
        prefixes.extend(match, self.namespace, self.column)
        return match.blocks
