"""Where Triton cannot run, plain torch serves and says why; where nothing asks for it, it is not imported."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from services.executor.kernels import choice
from services.executor.kernels.reference import ReferenceKernels
from services.executor.kernels.triton import needs
from services.executor.kernels.triton.kernels import TritonKernels

H200 = (9, 0)


@pytest.fixture(autouse=True)
def _whole_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")


def test_a_whole_machine_lacks_nothing() -> None:
    assert needs.missing(H200) is None


@pytest.mark.parametrize("lacking", ["capability", "gcc", "Python.h"])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str) -> None:
    if lacking == "gcc":
        monkeypatch.setattr("shutil.which", lambda name: None)
        monkeypatch.delenv("CC", raising=False)
    if lacking == "Python.h":
        (tmp_path / "Python.h").unlink()
    told = needs.missing((7, 5) if lacking == "capability" else H200)
    assert told is not None
    assert {"capability": "8.0", "gcc": "gcc", "Python.h": "python3-dev"}[lacking] in told


@pytest.mark.parametrize(("capability", "kernels"), [((7, 5), ReferenceKernels), (H200, TritonKernels)])
def test_the_choice_for_a_cuda_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kernels: type
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 132})
    )
    chosen = choice.choose(torch.device("cuda"), torch.bfloat16, 64, 16)
    assert type(chosen) is kernels
    if isinstance(chosen, TritonKernels):
        assert chosen.num_processors == 132


def test_an_executor_on_a_cpu_never_imports_triton() -> None:
    code = "import sys, services.executor.backends.torch_backend; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=100)
