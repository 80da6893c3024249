"""When to beat and when a silent peer is lost. Pure: time is an argument (seconds of any monotonic clock).

One ``Liveness`` watches one peer. Its owner calls ``heard`` for each sign of life, and ``lost`` and ``beat_due`` from a
timer that fires about once an interval.
"""

LATE_INTERVALS = 2.0
"""A check this much later than the one before it means that we slept ourselves (were stopped, swapped out, blocked)."""


class Liveness:
    """Counts the silence of one peer, but not the silence during our own sleep.

    After a late check the peer gets at least one more interval: what it sent while we slept lies unread in the socket,
    and only a peer that stays silent once we read again is lost.
    """

    def __init__(self, now: float, interval_s: float, timeout_s: float) -> None:
        assert 0 < LATE_INTERVALS * interval_s < timeout_s, (interval_s, timeout_s)
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._silent_since = now
        self._checked_at = now
        self._beat_at = now

    def heard(self, now: float) -> None:
        """The peer gave a sign of life."""
        self._silent_since = now

    def beat_due(self, now: float) -> bool:
        """Whether to send a heartbeat now; True counts as sent."""
        # Half an interval of slack: a timer that fires a little early must not skip every other beat.
        if now - self._beat_at < self._interval_s / 2:
            return False
        self._beat_at = now
        return True

    def lost(self, now: float) -> bool:
        """Whether the peer has been silent for longer than the timeout, as far as we were awake to hear it."""
        if now - self._checked_at > LATE_INTERVALS * self._interval_s:
            self._silent_since = max(self._silent_since, now - self._timeout_s + self._interval_s)
        self._checked_at = now
        return now - self._silent_since > self._timeout_s
