"""Logs our own mistakes: what broke and where, never the message, which might quote a prompt. Standard library only."""

import logging


def log_failure(log: logging.Logger, what: str, error: BaseException) -> None:
    """One error record with the traceback of ``error``, its message left out."""
    place = RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
    log.error("%s broke: %s", what, type(error).__name__, exc_info=place)
