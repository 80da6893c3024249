"""Systems for end-to-end tests: each fixture gives a factory, so that a test says its options and gets its system.

A system that a passed test has not stopped is stopped, and must stop cleanly. After a failure, or Ctrl-C, it is killed:
nobody waits for its streams. The log of a failed test's systems is in the test's report.
"""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.system import System

HERE = Path(__file__).parent
StartSystem = Callable[..., System]


DEFAULT_TIMEOUT_S = 600
"""Of a test here, the starts of its systems included: on a busy machine they take most of it."""


_PASSED = pytest.StashKey[bool]()
_SYSTEMS = pytest.StashKey[list[System]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DEFAULT_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_PASSED] = report.when == "call" and report.passed
    if report.when == "call" and report.failed:
        systems: list[System] = item.stash.get(_SYSTEMS, [])
        report.sections += [(f"log of system {number}", system.log) for number, system in enumerate(systems)]
    return report


@pytest.fixture
def start_system(request: pytest.FixtureRequest) -> Iterator[StartSystem]:
    """``start_system(max_lanes=4)`` starts a system and waits until it serves; see ``System`` for the arguments.

    ``wait=False`` returns it at once.
    """
    systems: list[System] = []
    request.node.stash[_SYSTEMS] = systems

    def start(*, wait: bool = True, **options: Any) -> System:
        system = System(**options)
        systems.append(system)
        return system.start() if wait else system.launch()

    yield start
    try:
        if request.node.stash.get(_PASSED, False):
            for system in systems:
                if system.running:
                    system.stop()
    finally:
        for system in systems:
            system.close()


@pytest.fixture
def fake_system(start_system: StartSystem) -> System:
    """A small system on the fake backend, with default options."""
    return start_system()


@pytest.fixture
def real_system(start_system: StartSystem) -> System:
    """A system with the default model in float32; mark the test with ``model``."""
    return start_system(backend="torch", dtype="float32")
