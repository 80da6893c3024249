"""A whole executor's steps on a device that computes nothing: whatever is asked of it must need no answer.

Torch's ``meta`` device knows shapes and types alone. To read a number of it, to pick by a mask or to copy it to the
host raises, and so tells of whatever would make the host wait for a real device. No kernel runs.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from services.executor import cuda_graphs, penalties, sampling
from services.executor.backends.torch_backend import TorchBackend
from services.executor.batch import SampleRow
from services.executor.constraints import Masks
from services.executor.kernels import feed
from services.executor.kernels.triton import attention, draw, elementwise, kernels, product
from services.executor.model import llama
from services.executor.options import ExecutorOptions
from shared.wire import tokens
from shared.wire.sampling import Sampling
from tools.gpu_check import overlap
from tools.gpu_check.worlds import Shape

META = torch.device("meta")
SHAPE = Shape("tiny", 48, 24, 3, 1, 16, 40)
KERNELS = [
    (attention, "attend_kernel"),
    (attention, "fold_kernel"),
    (elementwise, "rotary_write_kernel"),
    (elementwise, "add_rms_norm_kernel"),
    (elementwise, "silu_mul_kernel"),
    (product, "product_kernel"),
    (draw, "draw_kernel"),
]


class Launches:
    """Takes a kernel's place; looks only where its arguments are."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **constants: object) -> None:
            assert all(each.device == META for each in arguments if isinstance(each, Tensor))
            self._launched.append(self._name)

        return launch


class Arriving:
    """Takes a download's place: any token."""

    done = False

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.device == META
        assert tensor.dtype == torch.int64
        self._length = len(tensor)

    def wait(self) -> None:
        """There is nothing to wait for."""

    def read(self) -> list[int]:
        return [1] * self._length


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Nothing of the host takes part in what the device computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {each.device for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        assert devices <= {META}, f"{func} on {devices}"
        return func(*args, **(kwargs or {}))


def upload(columns: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    return [torch.empty(each.shape, dtype=getattr(torch, each.dtype.name), device=device) for each in columns]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched, on a device that computes nothing."""
    names: list[str] = []
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Launches(name, names))
    for module in (cuda_graphs, penalties, sampling, feed, draw, kernels, llama):
        monkeypatch.setattr(module, "upload", upload)
    monkeypatch.setattr(sampling, "Download", Arriving)
    return names


@pytest.fixture
def backend(launched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchBackend]:
    overlap.save_model(tmp_path, SHAPE, 2, 1024)
    monkeypatch.setattr("services.executor.model.device.choose_device", lambda name: META)
    options = ExecutorOptions(
        model=str(tmp_path), dtype="bfloat16", num_blocks=32, max_lanes=4, max_step_tokens=80, threads=1
    )
    loaded = TorchBackend(options, lambda line: None, lambda chosen: kernels.TritonKernels(META))
    with OneDevice():  # type: ignore[no-untyped-call]
        yield loaded


def test_starting_launches_every_kernel(backend: TorchBackend, launched: list[str]) -> None:
    """So that none is compiled while it serves, with captured steps or without."""
    backend._graphs = None
    backend.warm_up()
    assert set(launched) == {name for _, name in KERNELS}


@pytest.mark.parametrize("captured", [True, False])
def test_steps_that_are_fed_and_drawn_ask_nothing_of_the_device(backend: TorchBackend, captured: bool) -> None:
    if not captured:
        backend._graphs = None
    backend.warm_up()
    assert overlap.say(backend, 2, 3, 4).ahead == 3


def test_nor_does_whatever_a_row_may_ask_for(launched: list[str]) -> None:
    sampled = Sampling(
        temperature=1.0,
        min_tokens=10,
        stop_token_ids=tokens.pack([3, 4]),
        bias_ids=tokens.pack([1]),
        bias_values=tokens.pack_floats([1.0]),
        repetition_penalty=1.1,
        presence_penalty=0.5,
    )
    said = np.arange(5, dtype=np.int32)
    rows = [SampleRow(0, 0, 0, sampled, 5, said, 3), SampleRow(1, 1, 0, Sampling(), 5, said, 3, True)]
    with OneDevice():  # type: ignore[no-untyped-call]
        masks = Masks(allowed={1: np.zeros(5, np.uint8)})
        sampling.sample(torch.empty(2, 40, device=META), rows, draw.choose, masks)
        sampling.sample(torch.empty(0, 40, device=META), [], draw.choose)
    assert launched == ["draw_kernel"]
