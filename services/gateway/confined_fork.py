"""Work that a client brought and that may never end, or take all memory: done in a fork that the kernel bounds.

Called by the gateway's helper processes, which have one thread; whatever becomes of the fork, they go on.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Callable

CPU_S = 1.0
"""Processor time that a fork has."""
MEMORY_BYTES = 2**29
"""Address space that it may take beside what the helper process has."""
TOO_MUCH = f"it takes more than {CPU_S:g} s of processor time, or too much memory"


def in_confined_fork(work: Callable[[], bytes]) -> bytes | None:
    """What ``work`` returns; None when the fork went too far, or crashed."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        try:
            _confine()
            with os.fdopen(writable, "wb") as pipe:
                pipe.write(work())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return None if status else answer


def _confine() -> None:
    """What it has to say on standard error as it is ended, nobody needs."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # only Linux tells, and many threads' stacks may make it any size
        most = _address_space() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
