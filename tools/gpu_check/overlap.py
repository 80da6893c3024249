"""Do steps that are launched ahead say the same as steps one by one, and how long does the device wait between them?"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.executor.backend import Backend, Launched
from services.executor.backends.torch_backend import TorchBackend
from services.executor.batch import StepBatch
from services.executor.options import ExecutorOptions
from services.executor.stepper import Answer, Step, Stepper
from shared.wire import tokens
from shared.wire.executor import Admit, BatchPlan, BatchResult, Work, batch_plan, samples_of
from shared.wire.sampling import Sampling
from tools.gpu_check.worlds import Shape

PROMPT = 20
"""Tokens of each prompt."""


class Said(NamedTuple):
    """What the lanes say, and the pace of the steps that decode."""

    tokens: list[list[int]]
    """By lane."""
    ahead: int
    """Steps that were launched before the one before them was read."""
    gap_us: float
    """Median time from a step's end on the device to the beginning of the next; 0 where there is no device."""
    period_us: float
    """Median time from a step's end to the next one's."""


def save_model(folder: Path, shape: Shape, num_layers: int, context_len: int) -> None:
    """A folder that an executor can load, of random weights."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context_len,
        tie_word_embeddings=False,  # or such a model repeats itself, and a token from the wrong place goes unseen
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


class _Running:
    """A step that is never done when it is launched: a device may be faster than the host, and nothing be launched
    ahead."""

    done = False

    def __init__(self, launched: Launched) -> None:
        self.wait, self.read = launched.wait, launched.read


class _Timed:
    """Stands before a backend and marks each step's beginning and end in the device's stream."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.facts, self.limits = inner.facts, inner.limits
        self.released, self.taken, self.prepare = inner.released, inner.taken, inner.prepare
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def launch(self, batch: StepBatch) -> Launched:
        if not self._inner.device.startswith("cuda"):
            return _Running(self._inner.launch(batch))
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        launched = self._inner.launch(batch)
        ended.record()
        self.marks.append((begun, ended))
        return _Running(launched)

    def paces(self) -> tuple[float, float]:
        """See ``Said``. The prefill and its neighbours are left out."""
        if len(self.marks) < 4:
            return 0.0, 0.0
        torch.cuda.synchronize()
        pairs = list(zip(self.marks[2:], self.marks[3:], strict=False))
        gaps = [before[1].elapsed_time(after[0]) for before, after in pairs]
        periods = [before[1].elapsed_time(after[1]) for before, after in pairs]
        return float(np.median(gaps)) * 1e3, float(np.median(periods)) * 1e3


def say(backend: Backend, max_inflight: int, num_lanes: int, num_tokens: int) -> Said:
    """Half of the lanes take the most likely token, the others draw; with ``max_inflight`` plans outstanding."""
    timed = _Timed(backend)
    stepper = Stepper(timed)  # type: ignore[arg-type]  # a backend as far as a stepper is concerned
    answers: list[Answer] = []
    running: deque[Step] = deque()
    ahead = 0
    for number in range(num_tokens):
        plan = _plan(backend, number, number - max_inflight, num_lanes, num_tokens)
        ahead += bool(running)
        step = stepper.launch(plan, answers.append)
        if step is not None:
            running.append(step)
        while len(running) >= max_inflight:
            stepper.finish(running.popleft())
    for step in running:
        stepper.finish(step)
    stepper.reset()
    return Said(_by_lane(answers, num_lanes), ahead, *timed.paces())


def _plan(backend: Backend, step: int, confirmed: int, num_lanes: int, num_tokens: int) -> BatchPlan:
    """All prompts at once, then a decode of each lane a step."""
    if step:
        at = PROMPT + step - 1
        return batch_plan(0, step, confirmed, work=[Work(lane, at, 1, True) for lane in range(num_lanes)])
    draw = np.random.default_rng(0)
    per_lane = -(-(PROMPT + num_tokens) // backend.limits.block_size)
    admits = []
    for lane in range(num_lanes):
        prompt = draw.integers(0, backend.facts.vocab_size, PROMPT).tolist()
        blocks = range(lane * per_lane, (lane + 1) * per_lane)
        sampling = Sampling(temperature=0.8, top_p=0.95, seed=lane) if lane % 2 else Sampling()
        admits.append(Admit(lane, lane, tokens.pack(prompt), PROMPT, 0, tokens.pack(blocks), sampling))
    return batch_plan(0, 0, -1, admits=admits, work=[Work(lane, 0, PROMPT, True) for lane in range(num_lanes)])


def _by_lane(answers: list[Answer], num_lanes: int) -> list[list[int]]:
    said: list[list[int]] = [[] for _ in range(num_lanes)]
    for answer in answers:
        assert isinstance(answer, BatchResult), answer
        assert not answer.failures, answer
        for sample in samples_of(answer):
            said[sample.lane].append(sample.token)
    return said


def check(
    folder: Path, device: str, dtype: str, nums_lanes: Sequence[int], num_tokens: int, tell: Callable[[bool, str], int]
) -> int:
    """Load a model that ``save_model`` made and compare with each number of lanes; how many checks failed."""
    most = max(nums_lanes)
    options = ExecutorOptions(
        model=str(folder),
        device=device,
        dtype=dtype,
        num_blocks=most * -(-(PROMPT + num_tokens) // ExecutorOptions.block_size),
        max_lanes=most,
        max_step_tokens=most * PROMPT,
    )
    backend = TorchBackend(options, print)
    backend.warm_up()
    return sum(compare(backend, num_lanes, num_tokens, tell) for num_lanes in nums_lanes)


def compare(backend: Backend, num_lanes: int, num_tokens: int, tell: Callable[[bool, str], int]) -> int:
    """Both ways, in turns; how many checks failed."""
    one, two = (say(backend, max_inflight, num_lanes, num_tokens) for max_inflight in (1, 2))
    differ = sum(a != b for a, b in zip(one.tokens, two.tokens, strict=True))
    failed = tell(not differ, f"{num_lanes} lanes, {num_tokens} tokens: {differ} differ with steps launched ahead")
    failed += tell(two.ahead == num_tokens - 1 and not one.ahead, f"{two.ahead} steps were launched ahead")
    for max_inflight, said in ((1, one), (2, two)):
        print(f"     max_inflight {max_inflight}: {said.gap_us:.0f} us between steps, {said.period_us:.0f} us a step")
    return failed
