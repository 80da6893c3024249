"""How calls are written in a format: what a grammar for them is made of. Pure data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Notation:
    """``before``, then calls with ``between`` them, then ``after``."""

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str
    before: str = ""
    after: str = ""
    most_calls: int = 16
    """In one answer that is forced to call: a small model at a loss would go on with calls for ever."""
    begin: str = ""
    """What nothing but calls begins with, if there is such: the beginning of ``before`` and ``before_name``."""
    tag: str = ""
    """Where there is not: a call opens the text, or follows this."""
