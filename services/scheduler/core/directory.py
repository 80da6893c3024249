"""Which executor published a chain of tokens last: where a prefix is worth looking for. Used by ``prefix`` and
``placement``.

A chain is known here by a 32-bit checksum only. That is enough for a hint: whoever follows it matches token by token
in that executor's own cache, so a collision costs a look and nothing else.
"""

from zlib import crc32

Namespace = tuple[str, str]
"""Tenant and salt: chains of different namespaces never match."""


def root_chain(namespace: Namespace) -> int:
    """The checksum before a namespace's first block."""
    tenant, salt = namespace
    return crc32(salt.encode(), crc32(tenant.encode() + b"\0"))


def next_chain(before: int, block: bytes) -> int:
    """The checksum of a chain that is one block longer; ``block`` is a column."""
    return crc32(block, before)


class Directory:
    """Chains of all executors, by block size, because chains of other blocks are other chains."""

    __slots__ = ("_num_caches", "_owners")

    def __init__(self) -> None:
        self._owners: dict[int, dict[int, str]] = {}
        self._num_caches = 0

    def cache_number(self) -> int:
        """Tells a new cache from all before, those of an executor of the same name too: it may say hello again."""
        self._num_caches += 1
        return self._num_caches

    def publish(self, block_size: int, chain: int, executor_id: str) -> None:
        """An executor holds the chain now."""
        owners = self._owners.get(block_size)
        if owners is None:
            owners = self._owners[block_size] = {}
        owners[chain] = executor_id

    def withdraw(self, block_size: int, chain: int, executor_id: str) -> None:
        """It does not any more; what another one has published since stays."""
        owners = self._owners.get(block_size)
        if owners is not None and owners.get(chain) == executor_id:
            del owners[chain]
            if not owners:
                del self._owners[block_size]

    def deepest(self, namespace: Namespace, column: bytes, item_bytes: int) -> str | None:
        """The executor that published the longest chain of a column's tokens, or one that looks like it.

        Costs as much as what is found. It ends where nobody is known, even if somebody once published more.
        """
        found, most = None, 0
        for block_size, owners in self._owners.items():
            chain, step = root_chain(namespace), block_size * item_bytes
            for end in range(step, len(column), step):  # not the last block if nothing is left to compute behind it
                chain = next_chain(chain, column[end - step : end])
                executor_id = owners.get(chain)
                if executor_id is None:
                    break
                if end > most:
                    found, most = executor_id, end
        return found
