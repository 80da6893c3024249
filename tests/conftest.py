"""Lets a test be an ``async def``: it runs to its end on a fresh uvloop, as the services do."""

import inspect

import pytest
import uvloop


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test; leave every other one to pytest."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    uvloop.run(pyfuncitem.obj(**arguments))
    return True
