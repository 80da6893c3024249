"""Gateway and scheduler run where torch is not installed; so does a whole system on the fake backend."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.system import ROOT, START_S, System
from tests.fakes.waiting import wait_until

BLOCKER = """
import sys
from importlib.machinery import PathFinder

class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in ("torch", "triton"):
            return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [WithoutTorch if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Environment variables under which no Python process can import torch or triton."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    env = {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", "import torch"], env=os.environ | env, capture_output=True, text=True
    )
    assert "No module named 'torch'" in result.stderr
    return env


@pytest.mark.timeout(600)
def test_a_system_on_the_fake_backend(without_torch: dict[str, str]) -> None:
    system = System(env=without_torch)
    try:
        system.start()
        assert system.client().completions.create(model="default", prompt="hello", max_tokens=3).choices[0].text
        system.stop()
    finally:
        system.close()


@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_gateway_with_a_real_tokenizer(without_torch: dict[str, str]) -> None:
    from tools.model import cached

    folder = cached("default", lambda line: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        command = [sys.executable, "-m", "tools.main", "gateway", f"--model={folder}", f"--fd={listening.fileno()}"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PATERNOSTER_")} | without_torch
        gateway = subprocess.Popen(
            [*command, "--metrics-port=0", "--scheduler=tcp://127.0.0.1:1"],
            cwd=ROOT,
            env=env,
            pass_fds=[listening.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )

    def lives() -> bool:
        assert gateway.poll() is None, gateway.communicate()[1]
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(lives, START_S, "the gateway lives")
        assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 503
        gateway.terminate()
        assert gateway.communicate(timeout=60)[1].count("Traceback") == 0
        assert gateway.returncode == 0
    finally:
        gateway.kill()
        gateway.wait()
