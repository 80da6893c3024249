"""``python -m tools.gpu_check``: correctness, invariance, overlap of steps and speed on a CUDA device, as a table each.

Exits with 1 when a check failed. ``--quick`` leaves out the larger model and the speeds.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = [(1, 1), (16, 1), (256, 1), (257, 1), (3000, 1), (900, 3), (1500, 512), (40, 40), (129, 7)]
"""Context and tokens computed of each row: one step of everything."""


def main() -> int:
    """Run everything there is a device for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    with torch.inference_mode():
        parts: list[Callable[[torch.device, bool], int]] = [_correctness, _invariance, _captured, _overlap]
        failed = sum(_timed(part, device, quick) for part in parts)
        if not quick:
            _timed(_speed, device, quick)
    print(f"{failed} checks failed" if failed else "all checks passed")
    return int(failed > 0)


def _timed(part: Callable[[torch.device, bool], int], device: torch.device, quick: bool) -> int:
    started = time.monotonic()
    print(f"\n== {part.__name__.strip('_')}", flush=True)
    failed = part(device, quick)
    torch.cuda.empty_cache()
    print(f"   ({time.monotonic() - started:.0f} s)", flush=True)
    return failed


def _told(fine: bool, line: str) -> int:
    """Print a check's line; 1 when it failed."""
    print("ok  " if fine else "FAIL", line, flush=True)
    return int(not fine)


def _correctness(device: torch.device, quick: bool) -> int:
    from services.executor.kernels.triton.kernels import TritonKernels
    from tools.gpu_check import correctness, worlds

    failed = 0
    for shape in worlds.SHAPES[:1] if quick else worlds.SHAPES:
        for dtype in DTYPES:
            for found in correctness.check(TritonKernels(device), shape, dtype, ROWS):
                mark = "ok  " if found.fine else "FAIL"
                print(
                    f"{mark} {shape.name:13} {dtype!s:15} off by {found.off:.1e} of {found.allowed:.0e}  {found.what}"
                )
                failed += not found.fine
    return failed


def _invariance(device: torch.device, quick: bool) -> int:
    from services.executor.kernels.triton.kernels import TritonKernels
    from tools.gpu_check import invariance, worlds

    failed = 0
    for shape in worlds.SHAPES[:1] if quick else worlds.SHAPES:
        for dtype in DTYPES:
            num_rows = 4000 if dtype is not torch.float32 or shape is worlds.SHAPES[0] else 500
            for found in invariance.check(TritonKernels(device), shape, dtype, num_rows, 2000):
                moved = f"{found.moved} of {found.rows} rows moved"
                failed += _told(not found.moved, f"{shape.name:13} {dtype!s:15} {moved}  {found.what}")
    return failed


def _captured(device: torch.device, quick: bool) -> int:
    from services.executor.kernels.triton.kernels import TritonKernels
    from tools.gpu_check import invariance, worlds

    failed = 0
    for dtype in DTYPES:
        model = invariance.random_model(TritonKernels(device), worlds.SHAPES[0], dtype, 4, 40, 1024)
        model.graphs.capture()
        found = invariance.check_captured(model, 40, 1024)
        print(
            f"{'FAIL' if found.moved else 'ok  '} {dtype!s:15} {found.moved} of {found.rows} rows moved  {found.what}"
        )
        failed += found.moved > 0
    return failed


def _overlap(device: torch.device, quick: bool) -> int:
    from tools.gpu_check import overlap, worlds

    with tempfile.TemporaryDirectory() as name:
        overlap.save_model(Path(name), worlds.SHAPES[0], 4 if quick else 30, 1024)
        return sum(
            overlap.check(Path(name), device.type, dtype, (1, 8, 64), 100, _told) for dtype in ("float32", "bfloat16")
        )


def _speed(device: torch.device, quick: bool) -> int:
    from triton.testing import do_bench

    from services.executor.kernels.triton.kernels import TritonKernels
    from tools.gpu_check import invariance, speed, worlds

    def seconds(run: Callable[[], object]) -> float:
        return float(do_bench(run, warmup=5, rep=30, return_mode="median")) / 1e3

    kernels, dtype = TritonKernels(device), torch.bfloat16
    limits = speed.limits(dtype, device, seconds)
    print(f"memory {limits.bytes_per_s / 1e9:.0f} GB/s copied, {limits.flop_per_s / 1e12:.0f} TFLOP/s in {dtype}")

    def show(rate: speed.Rate, more: str = "") -> None:
        by_memory, by_matrix = rate.shares(limits)
        print(f"{rate.seconds * 1e6:9.1f} us {by_memory:5.0%} of memory {by_matrix:5.0%} of matrix  {rate.what}{more}")

    for shape in worlds.SHAPES:
        print(shape.name)
        for ours, library in speed.products(kernels, shape, dtype, seconds, (1, 32, 512, 4096)):
            show(ours, f"; {ours.seconds / library.seconds:.2f} of the library's time")
        mixes = [(1, 8192, 1), (32, 512, 1), (64, 4096, 1), (1, 2048, 512), (1, 4096, 4096)]
        for rate in speed.attention(kernels, shape, dtype, seconds, mixes):
            show(rate)
        for rate in speed.elementwise(kernels, shape, dtype, seconds, (32, 4096)):
            show(rate)
    model = invariance.random_model(kernels, worlds.SHAPES[0], dtype, 30, 64, 1024)
    model.graphs.capture()
    for rows in (1, 8, 32, 64):
        captured, plain = speed.decode_steps(model, seconds, rows, 512)
        print(
            f"{rows:3} decodes of {worlds.SHAPES[0].name}: {captured * 1e3:.2f} ms captured, {plain * 1e3:.2f} ms not"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
