"""What ``make gpu-check`` does on a device, in miniature: it passes good kernels and tells on bad ones."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from services.executor.backends.fake import FakeBackend
from services.executor.kernels.interface import Linear
from services.executor.kernels.triton.kernels import TritonKernels
from services.executor.options import ExecutorOptions
from shared import fake_model
from shared.wire.facts import ExecutorLimits
from tests.fakes.device_backend import DeviceBackend
from tests.fakes.triton_device import DEVICE
from tools.gpu_check import __main__ as program
from tools.gpu_check import correctness, invariance, overlap, speed
from tools.gpu_check.worlds import Shape

SHAPE = Shape("tiny", 32, 24, 3, 1, 16, 40)


class BadKernels(TritonKernels):
    """Wrong in one place, and different for single rows in another."""

    def silu_mul(self, gate_up_TC: Tensor) -> Tensor:
        return super().silu_mul(gate_up_TC) * 1.1

    def linear(self, weight: Tensor, bias: Tensor | None, exact: bool = False) -> Linear:
        product = super().linear(weight, bias, exact)
        return lambda x: product(x) if len(x) > 1 else product(x) * 1.01


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(("kernels", "wrong"), [(TritonKernels, []), (BadKernels, ["SiLU"])])
def test_correctness_finds_what_is_wrong(kernels: Callable[..., TritonKernels], wrong: list[str]) -> None:
    found = list(correctness.check(kernels(DEVICE), SHAPE, torch.float32, [(1, 1), (270, 1), (20, 3)]))
    assert [finding.what for finding in found if not finding.fine] == wrong
    assert len(found) == 15


def test_nan_is_never_fine() -> None:
    assert not correctness.Finding("", float("nan"), 1.0).fine


@pytest.mark.parametrize("kernels", [TritonKernels, BadKernels])
def test_invariance_counts_rows_that_move(kernels: Callable[..., TritonKernels]) -> None:
    found = list(invariance.check(kernels(DEVICE), SHAPE, torch.float16, 24, 40))
    moved = [check.what.split()[0] for check in found if check.moved]
    assert moved == (["product"] * 5 if kernels is BadKernels else [])
    assert len(found) == 10


def test_captured_steps_are_compared_with_plain_ones() -> None:
    model = invariance.random_model(TritonKernels(DEVICE), SHAPE, torch.float32, 1, 3, 20)
    model.graphs.capture()
    assert invariance.check_captured(model, 3, 20)[1:] == (6, 0)


def test_speeds_are_told_as_shares() -> None:
    kernels, counts = TritonKernels(DEVICE), (2,)

    def timer(run: Callable[[], object]) -> float:
        run()
        return 0.5

    limits = speed.limits(torch.float32, DEVICE, timer, size=8)
    assert limits == (2 * 16 * 64 * 4 / 0.5, 2 * 8**3 / 0.5)
    ours, library = next(speed.products(kernels, SHAPE, torch.float32, timer, counts))
    assert ours[1:] == library[1:] == (0.5, 4 * (80 * 32 + 2 * 32 + 2 * 80), 2 * 2 * 80 * 32)
    assert ours.shares(speed.Limits(ours.bytes_moved * 4, ours.flops * 8)) == (0.5, 0.25)
    (attention,) = speed.attention(kernels, SHAPE, torch.float32, timer, [(2, 10, 3)])
    assert attention.flops == 4 * 3 * 16 * 2 * (8 + 9 + 10)
    assert len(list(speed.elementwise(kernels, SHAPE, torch.float32, timer, counts))) == 3
    model = invariance.random_model(kernels, SHAPE, torch.float32, 1, 2, 20)
    model.graphs.capture()
    assert speed.decode_steps(model, timer, 2, 7) == (0.5, 0.5)


@pytest.mark.parametrize("feeds", [True, False])
def test_steps_launched_ahead_are_compared_with_steps_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], feeds: bool
) -> None:
    device = DeviceBackend(FakeBackend(fake_model.facts(64), ExecutorLimits(64, 4, 4, 128)))
    if not feeds:
        launch = device.launch
        monkeypatch.setattr(device, "launch", lambda batch: launch(replace(batch, fed_tokens=batch.fed_tokens[:0])))
    told: list[tuple[bool, str]] = []
    failed = overlap.compare(device, 3, 8, lambda fine, line: told.append((fine, line)) or int(not fine))
    assert failed == int(not feeds)
    assert told[0][0] == feeds
    assert told[1] == (True, "7 steps were launched ahead")
    assert capsys.readouterr().out.count("us between steps") == 2


def test_the_prompts_of_all_lanes_fit_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def device_of(options: ExecutorOptions, on_progress: object) -> DeviceBackend:
        assert options.num_blocks
        limits = ExecutorLimits(options.num_blocks, options.block_size, options.max_lanes, options.max_step_tokens)
        return DeviceBackend(FakeBackend(fake_model.facts(64), limits))

    monkeypatch.setattr(overlap, "TorchBackend", device_of)
    assert overlap.check(Path(), "cuda", "float32", (1, 30), 3, lambda fine, line: int(not fine)) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    assert program.main() == 0
    assert capsys.readouterr().out == "skipped: no CUDA device\n"
