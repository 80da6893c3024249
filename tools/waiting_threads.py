"""How compute threads wait for each other: set before torch loads, for OpenMP reads it once.

Called by every command that computes. Imports nothing.
"""

import os

_SPINS = 5000
"""Turns of a thread's waiting loop before it sleeps, some tens of microseconds: about as long as waking up takes.

Threads that never spin are woken a hundred times a step (measured: 21 ms instead of 14 for one decode of the default
model); threads that spin for long hold the cores that the other processes need (24 tokens took 16 s instead of 1.1 s
on a machine with more to do than cores)."""


def choose_wait() -> None:
    """Spin shortly, then sleep; unless the user's environment says otherwise."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
