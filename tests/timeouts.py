"""What a test that takes too long leaves behind: where each thread of its worker is.

pytest-timeout tells so itself, but on stdout, which a worker of pytest-xdist does not have. Here ``faulthandler`` does,
on stderr; it needs no thread of Python's, and it ends the worker even where a kernel does not return. A plugin, named
in ``tests/conftest.py``.
"""

import faulthandler
import os
from typing import Any

import pytest

_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # as long as nothing captures it


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Leave it to pytest-timeout where tests run one by one."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[_STDERR])
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    faulthandler.cancel_dump_traceback_later()
    return True
