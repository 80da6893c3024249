"""Devices, number formats and threads: what `auto` means, and what is refused."""

from collections.abc import Iterator

import pytest
import torch

from services.executor.model import device as devices

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("in_hardware", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=["bf16 units", "none"]
)
def test_auto_is_bfloat16_where_the_cpu_computes_it(
    in_hardware: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_has_bfloat16", lambda: in_hardware)
    assert devices.choose_dtype("auto", CPU) == dtype
    assert devices.choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert devices.choose_dtype("float16", CPU) == torch.float16
    assert devices.describe(CPU).endswith("bf16") == in_hardware


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert devices.choose_device("auto") == CPU
    with pytest.raises(ValueError, match="no CUDA device"):
        devices.choose_device("cuda")


@pytest.mark.parametrize("fails", [True, False])
def test_a_device_has_failed_when_it_answers_no_more(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def synchronize(device: torch.device) -> None:
        if fails:
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    assert devices.has_failed(torch.device("cuda")) == fails
    assert not devices.has_failed(CPU)


def test_threads_are_the_physical_cores_we_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.set_threads(3) == torch.get_num_threads() == 3
    monkeypatch.setattr(devices, "_physical_cores", lambda: {"0,4", "1,5"})
    assert devices.set_threads(None) == torch.get_num_threads() == 2
    monkeypatch.undo()
    assert 1 <= devices.set_threads(None) <= torch.multiprocessing.cpu_count()
