"""The kernels for every instruction set that this machine has: all of them right, int8 products to the same bits."""

from pathlib import Path

import pytest
import torch

from services.executor.kernels import int8
from services.executor.kernels.cpu import build
from services.executor.kernels.cpu.bindings import CpuLibrary
from tests.kernels.test_cpu_attention import World

SEQUENCES = [(1, 1), (17, 17), (300, 1), (600, 90), (64, 5)]
LEVELS = list(build.LEVELS)
LEVELS = LEVELS[LEVELS.index(build.level()) :] if build.level() in LEVELS else [build.level()]
HEADS = [(9, 3, 64), (8, 1, 128), (2, 2, 80), (10, 2, 32)]


@pytest.mark.soak
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_is_right(level: str, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    build.compile_library(build.command_for("g++", level), library)
    kernels = CpuLibrary(library)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        for heads in HEADS:
            world = World([n for n, _ in SEQUENCES], [count for _, count in SEQUENCES], *heads, dtype)
            for window in (0, 40):
                found = world.run(kernels, window).float()
                torch.testing.assert_close(found, world.expected(window), rtol=tolerance, atol=tolerance)
        x, weight = torch.randn(13, 576).to(dtype), torch.randn(97, 576).to(dtype)
        assert torch.equal(kernels.int8_linear(weight, None)(x), int8.plain(weight, None)(x))
        gate, up = torch.randn(2, 13, 50).to(dtype)
        normed = kernels.add_rms_norm(x, None, weight[0], 1e-5)
        expected = torch.nn.functional.rms_norm(x.float(), (576,), weight[0].float(), 1e-5)
        torch.testing.assert_close(normed.float(), expected, rtol=tolerance, atol=tolerance)
        found = kernels.silu_mul(torch.cat([gate, up], dim=1))
        torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, rtol=tolerance, atol=tolerance)
