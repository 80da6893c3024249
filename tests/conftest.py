"""What every test may rely on: an ``async def`` test runs on a fresh uvloop, as the services do; Hypothesis does not
mistake a busy machine for a slow test; Triton's kernels run by its interpreter where there is no NVIDIA driver; compute
threads wait for each other as the executor's do, for spinning ones hold the core that another worker's test needs.
"""

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tools.waiting_threads import choose_wait

choose_wait()
if not Path("/proc/driver/nvidia/version").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, by whatever test comes first
    # The interpreter multiplies by numpy, whose product for AVX2 (not AVX-512) gives a row other bits in another place.
    os.environ.setdefault("OPENBLAS_CORETYPE", "Nehalem")

pytest_plugins = ["tests.timeouts"]
settings.register_profile("paternoster", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("paternoster")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test; leave every other one to pytest."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    uvloop.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors only wait for a second thread, for long where other tests run too."""
    import torch  # not for tests that need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
