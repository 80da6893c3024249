"""When a silent peer is lost, with a clock in hand."""

import pytest

from shared.net.liveness import Liveness

INTERVAL, TIMEOUT = 1.0, 5.0


def _ticks(liveness: Liveness, start: float, end: float) -> list[float]:
    """Check once an interval in (start, end]; the times at which the peer was lost."""
    times = [start + step * INTERVAL for step in range(1, int((end - start) / INTERVAL) + 1)]
    return [time for time in times if liveness.lost(time)]


def test_a_peer_that_beats_is_never_lost() -> None:
    liveness = Liveness(0.0, INTERVAL, TIMEOUT)
    for second in range(1, 1000):
        liveness.heard(second - 0.5)
        assert not liveness.lost(float(second))


def test_a_silent_peer_is_lost_after_the_timeout_and_not_before() -> None:
    liveness = Liveness(100.0, INTERVAL, TIMEOUT)
    liveness.heard(100.5)
    assert _ticks(liveness, 100.0, 110.0)[0] == 106.0


@pytest.mark.parametrize("slept", [2.5, 5.5, 60.0, 1e6])
@pytest.mark.parametrize("silent_before", [0, 4])
def test_our_own_sleep_is_not_the_peers_silence(slept: float, silent_before: int) -> None:
    liveness = Liveness(0.0, INTERVAL, TIMEOUT)
    assert not _ticks(liveness, 0.0, float(silent_before))
    woken = silent_before + slept
    assert not liveness.lost(woken)
    liveness.heard(woken + 0.01)  # what lay unread in the socket
    assert not _ticks(liveness, woken, woken + TIMEOUT)


def test_a_peer_that_stays_silent_after_our_sleep_is_lost_soon() -> None:
    liveness = Liveness(0.0, INTERVAL, TIMEOUT)
    assert not liveness.lost(60.0)
    assert _ticks(liveness, 60.0, 70.0)[0] <= 62.0


def test_sleep_does_not_shorten_the_patience_with_a_peer_that_was_just_heard() -> None:
    liveness = Liveness(0.0, INTERVAL, TIMEOUT)
    liveness.heard(59.9)
    assert not liveness.lost(60.0)
    assert _ticks(liveness, 60.0, 70.0)[0] == 65.0


def test_beats_are_due_once_an_interval_also_when_the_timer_is_early_or_asks_twice() -> None:
    liveness = Liveness(0.0, INTERVAL, TIMEOUT)
    due = [time for time in (0.1, 0.99, 1.0, 1.2, 1.98, 3.0) if liveness.beat_due(time)]
    assert due == [0.99, 1.98, 3.0]


def test_a_timeout_that_a_single_late_beat_would_break_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        Liveness(0.0, 1.0, 2.0)
