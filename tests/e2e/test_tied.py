"""No system outlives the test process, even one that had no chance to stop it."""

import subprocess
import sys

import psutil

from tests.e2e.system import TIED
from tests.fakes.waiting import wait_until

PARENT = """
import subprocess, sys
child = subprocess.Popen([*sys.argv[1:], sys.executable, "-c", "import time; print('on', flush=True); time.sleep(300)"])
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_of_a_killed_test_process_is_told_to_stop() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, *TIED], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        told = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        assert "on" in told
        child = psutil.Process(int((told - {"on"}).pop()))
        parent.kill()
        wait_until(lambda: not child.is_running(), 20, "the child is gone")
