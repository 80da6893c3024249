"""When a dead child is started again, and when that is no use. Pure: time arrives as an argument.

Called by ``tools.supervisor``; imports nothing of the product.
"""

from dataclasses import dataclass

CONFIGURATION_ERROR = 78
"""A service's exit code (sysexits' EX_CONFIG) for a mistake that starting it again will not mend."""

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
STEADY_AFTER_S = 30.0
"""A child that lived this long starts again with the first delay."""
TRIES_BEFORE_READY = 3
"""Deaths of one child before the system was ever ready that end everything."""


@dataclass
class Restarts:
    """One child's history of deaths."""

    deaths_before_ready: int = 0
    _next_delay_s: float = FIRST_DELAY_S

    def delay_after(self, code: int, lived_s: float, was_ready: bool) -> float | None:
        """Seconds to wait before the next start, or None when the child cannot start.

        ``code`` is the exit code (negative: a signal), ``lived_s`` how long the child ran, ``was_ready`` whether the
        whole system has ever been ready.
        """
        if code == CONFIGURATION_ERROR:
            return None
        if not was_ready:
            self.deaths_before_ready += 1
            if self.deaths_before_ready >= TRIES_BEFORE_READY:
                return None
        if lived_s >= STEADY_AFTER_S:
            self._next_delay_s = FIRST_DELAY_S
        delay = self._next_delay_s
        self._next_delay_s = min(2 * delay, LONGEST_DELAY_S)
        return delay
