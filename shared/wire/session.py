"""Messages that open, keep and end a session; the same on both links.

A session opens with a hello (frame session id 0). The scheduler answers with a welcome that carries the new session's
id in its frame, or with ``Refused``. Afterwards every frame in both directions carries that id; a frame with another
id is counted, dropped and answered with ``Rehello``.
"""

from msgspec import Struct

PROTOCOL = 1
"""Version of the messages. Both sides must have the same one."""


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """scheduler -> peer: the hello is not accepted and will not be if repeated unchanged."""

    reason: str


class Rehello(Struct, frozen=True, array_like=True, tag="rehello"):
    """scheduler -> peer: that session is not alive (any more); say hello again."""


class Heartbeat(Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Both ways, once a second: alive.

    ``busy_ms`` is how long the executor's present step has been running (0 when idle and from others).
    """

    busy_ms: int = 0


class Goodbye(Struct, frozen=True, array_like=True, tag="goodbye"):
    """peer -> scheduler: leaving on purpose; the session ends now."""
