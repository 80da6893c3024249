"""The whole backend on the Triton kernels: tokens fed on the device are those that the host would have read."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from services.executor.backends.torch_backend import TorchBackend
from services.executor.kernels import feed
from services.executor.kernels.triton.kernels import TritonKernels
from services.executor.options import ExecutorOptions
from tests.fakes.steps import Row, step
from tests.fakes.triton_device import DEVICE
from tools.gpu_check import overlap
from tools.gpu_check.worlds import Shape

SHAPE = Shape("tiny", 48, 24, 3, 1, 16, 40)
NUM_LANES, NUM_TOKENS = 2, 4


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    folder = tmp_path_factory.mktemp("model")
    overlap.save_model(folder, SHAPE, 1, 64)
    options = ExecutorOptions(
        model=str(folder),
        device=DEVICE.type,
        dtype="float32",
        block_size=4,  # too small for the compiled kernels: they are not built first
        num_blocks=32,
        max_lanes=4,
        max_step_tokens=64,
        threads=1,
    )
    loaded = TorchBackend(options, lambda line: None, lambda kernels: TritonKernels(DEVICE))
    loaded.warm_up()
    return loaded


@pytest.fixture(scope="module")
def expected(backend: TorchBackend) -> list[list[int]]:
    return overlap.say(backend, 1, NUM_LANES, NUM_TOKENS).tokens


@pytest.mark.parametrize("captured", [True, False])
def test_the_tokens_are_those_of_steps_one_by_one(
    backend: TorchBackend, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    if not captured:
        monkeypatch.setattr(backend, "_graphs", None)
    said = overlap.say(backend, 2, NUM_LANES, NUM_TOKENS)
    assert said.tokens == expected
    assert said.ahead == NUM_TOKENS - 1


def test_a_device_that_feeds_nothing_would_be_seen(
    backend: TorchBackend, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.executor.cuda_graphs.feed", lambda *_: None)
    assert overlap.say(backend, 2, NUM_LANES, NUM_TOKENS).tokens != expected


def test_on_the_host_a_step_is_done_when_it_is_launched(backend: TorchBackend) -> None:
    if DEVICE.type == "cpu":
        assert backend.launch(step([Row([5, 6, 7], 0, 3, [0])], 4)).done


def test_fed_tokens_take_their_places_and_one_that_failed_is_any_token() -> None:
    batch = step([Row([5, 6, 7], 0, 3, [0]), Row([8, 9], 1, 1, [1]), Row([4, 3], 1, 1, [2])], 4)
    fed = replace(batch, fed_tokens=np.array([3, 4]), fed_samples=np.array([2, 0]))
    token_ids = torch.tensor([5, 6, 7, 0, 0], dtype=torch.int32, device=DEVICE)
    feed.feed(token_ids, fed, torch.tensor([11, 12, -1], device=DEVICE))
    assert token_ids.tolist() == [5, 6, 7, 0, 11]
    feed.feed(token_ids, batch, None)
    assert token_ids.tolist() == [5, 6, 7, 0, 11]
