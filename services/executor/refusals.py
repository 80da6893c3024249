"""How a plan that does not fit is refused, and how its columns are read. Used by ``lanes``; pure."""

from collections.abc import Callable

import numpy as np

from services.executor.progress import Ints, Mask


class PlanError(ValueError):
    """The plan does not fit what the executor holds."""


def column(packed: bytes) -> Ints:
    """A column as signed 64-bit integers, ready for arithmetic. Raises PlanError when it is cut within an integer."""
    if len(packed) % 4:
        raise PlanError("a column does not hold whole integers")
    return np.frombuffer(packed, "<u4").astype(np.int64)


def collect(problems: list[str], change: Callable[..., None], *arguments: object) -> None:
    """Make one change; what is wrong with it joins ``problems``."""
    try:
        change(*arguments)
    except PlanError as error:
        problems.append(str(error))


def refuse(bad: Mask, lanes: Ints, why: str) -> None:
    """Raise PlanError for the first lane that is ``bad``, if any."""
    if bad.any():
        raise PlanError(f"lane {lanes[bad.argmax()]}: {why}")
