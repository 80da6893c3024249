"""Names of the environment variables that set options. Read by ``tools`` only; imports the standard library only.

Every option ``--max-lanes`` is also the variable ``PATERNOSTER_MAX_LANES``. A misspelt variable would be ignored in
silence, so unknown ones stop the start.
"""

from collections.abc import Collection, Mapping

ENV_PREFIX = "PATERNOSTER_"


def variable_of(option: str) -> str:
    """The variable of an option: ``--max-lanes`` gives ``PATERNOSTER_MAX_LANES``."""
    return ENV_PREFIX + option.lstrip("-").replace("-", "_").upper()


def unknown_variables(environ: Mapping[str, str], known: Collection[str]) -> list[str]:
    """Sorted names in ``environ`` that have our prefix but are not among ``known`` (full variable names)."""
    return sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)
