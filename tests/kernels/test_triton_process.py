"""The executor process on the Triton kernels, from its start to a session in which steps are launched ahead."""

from pathlib import Path
from typing import Any

import pytest

from shared.wire.executor import Work, batch_plan
from shared.wire.sampling import Sampling
from tests.fakes.plans import admit, sampled
from tests.fakes.scheduler_side import EPOCH, SchedulerSide
from tests.fakes.triton_device import DEVICE
from tests.integration.test_executor_process import executor
from tools.gpu_check import overlap
from tools.gpu_check.worlds import Shape

pytestmark = pytest.mark.timeout(300)
CHILD = f"""
import json, sys, torch
from services.executor.backends import torch_backend
from services.executor.kernels.download import Download
from services.executor.kernels.triton.kernels import TritonKernels
from services.executor.main import run
from services.executor.options import ExecutorOptions
torch_backend.choose = lambda *_: TritonKernels(torch.device("{DEVICE.type}"))
Download.done = False  # as on a device that takes its time
sys.exit(run(ExecutorOptions(**json.loads(sys.argv[1]))))
"""
NUM_STEPS = 3
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3, min_tokens=2)]


async def said(scheduler: SchedulerSide, first: int, outstanding: int) -> list[list[int]]:
    """Tokens of each step, with that many plans on their way; the lanes are then retired."""
    begun = len(scheduler.answers)
    for nth in range(NUM_STEPS):
        if nth >= outstanding:
            await scheduler.answered(begun + nth - outstanding + 1)
        admits = [
            admit(lane, [7, 8, 9], [2 * lane, 2 * lane + 1], seq=first + lane, sampling=sampling)
            for lane, sampling in enumerate(SAMPLINGS if nth == 0 else [])
        ]
        work = [Work(lane, 2 + nth if nth else 0, 1 if nth else 3, True) for lane in range(len(SAMPLINGS))]
        scheduler.send(batch_plan(EPOCH, first + nth, first + nth - outstanding, admits=admits, work=work))
    await scheduler.answered(begun + NUM_STEPS)
    answers = scheduler.answers[begun:]
    await scheduler.ask(batch_plan(EPOCH, first + NUM_STEPS, first + NUM_STEPS - 1, retires=[0, 1]))
    return [sampled(answer) for answer in answers]


async def test_a_process_says_the_same_with_one_plan_outstanding_and_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap.save_model(tmp_path / "model", Shape("tiny", 48, 24, 3, 1, 16, 40), 1, 64)
    monkeypatch.setattr("tests.integration.test_executor_process.CHILD", CHILD)
    options: dict[str, Any] = {
        "backend": "torch",
        "model": str(tmp_path / "model"),
        "device": DEVICE.type,
        "dtype": "float32",
    }
    sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 16, "max_lanes": 2, "max_step_tokens": 64, "threads": 1}
    async with executor(tmp_path, **options, **sizes) as (scheduler, child):
        await scheduler.joined()
        expected = await said(scheduler, 1, 1)
        assert await said(scheduler, 1 + NUM_STEPS + 1, 2) == expected
        assert child.process.poll() is None
