"""Stops the start when the environment holds a ``PATERNOSTER_*`` variable that no option reads.

Called by ``tools.main`` before any command. Imports typer's view of the command line, nothing of the services.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from shared.config import ENV_PREFIX, unknown_variables

FAULTS = "PATERNOSTER_FAULTS"
"""Read by the fake backend itself: JSON, for tests only."""


def known_variables(command: Any) -> set[str]:
    """Every variable that an option of ``command`` or of a command below it reads."""
    known = {FAULTS}
    for parameter in command.params:
        variables = parameter.envvar or ()
        known |= {variables} if isinstance(variables, str) else set(variables)
    for below in getattr(command, "commands", {}).values():
        known |= known_variables(below)
    return known


def complaints(environ: Mapping[str, str], known: set[str]) -> list[str]:
    """One line for each unknown variable, with the nearest known name where there is one."""
    lines = []
    for name in unknown_variables(environ, known):
        stems = sorted(each.removeprefix(ENV_PREFIX) for each in known)
        near = get_close_matches(name.removeprefix(ENV_PREFIX), stems, n=1)
        hint = f"; did you mean {ENV_PREFIX}{near[0]}?" if near else ""
        lines.append(f"unknown environment variable {name}{hint}")
    return lines
