"""Ids and seeds. Every request takes several: asking the kernel for each would be a good part of its cost."""

import itertools
import random
import secrets

_PROCESS = secrets.token_hex(6)
"""Tells this process's ids from those of every other, and of its own earlier lives."""
_numbers = itertools.count()
_random = random.Random(secrets.randbits(128))


def new_id() -> str:
    """Hexadecimal digits that no process has used before; no secret."""
    return f"{_PROCESS}{next(_numbers):012x}"


def random_seed() -> int:
    """63 random bits."""
    return _random.getrandbits(63)
