"""The backend that runs a real model with torch. Called by the executor's shell through ``load``."""

import logging
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from services.executor import logprobs, memory, numerics, sampling
from services.executor.backend import Backend, StepError, StepOutput
from services.executor.batch import PromptRow, SampleRow, StepBatch
from services.executor.constraints import Constraints
from services.executor.kernels.choice import choose
from services.executor.kernels.interface import Kernels, LayerCache
from services.executor.model import choice, end_tokens
from services.executor.model import device as devices
from services.executor.model.llama import Llama
from services.executor.model.paged import PagedModel, States
from services.executor.options import ExecutorOptions
from shared.constraints import read_vocabulary
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.sampling import Constraint, Sampling

if TYPE_CHECKING:
    from services.executor.cuda_graphs import DecodeGraphs

log = logging.getLogger(__name__)

MAX_PROMPT_LOGITS = 128
"""Rows of logits held at once for the logprobs of prompts, whatever the size of a step."""
LONG_CONTEXT = 512
"""Tokens that the decode of the warm-up looks at: enough for what kernels do with long contexts alone."""


class TorchBackend:
    """Weights, KV memory and sampling on one device; see ``backend.Backend``."""

    def __init__(
        self,
        options: ExecutorOptions,
        on_progress: Callable[[str], None],
        wrap: Callable[[Kernels], Kernels] | None = None,
    ) -> None:
        """Load ``options.model``. Raises ValueError for a model or options that cannot work.

        ``wrap`` may put something between the model and the kernels chosen for it: a measurement does.
        """
        folder = Path(options.model)
        torch_device = devices.choose_device(options.device)
        dtype = devices.choose_dtype(options.dtype, torch_device)
        threads = devices.set_threads(options.threads)
        config = choice.read(folder)
        context_len = _context_len(options.max_model_len, config.context_len)
        self._torch_device, self.device = torch_device, devices.describe(torch_device)
        self.facts = _facts(folder, config.vocab_size, context_len)
        started = time.monotonic()
        quantized = "" if options.quantization == "none" else f", weights {options.quantization}"
        on_progress(f"loading {self.facts.model} as {dtype}{quantized} on {self.device}, {threads} threads")

        def kernels_of(head_dim: int) -> Kernels:
            kernels = choose(torch_device, dtype, head_dim, options.block_size, options.quantization)
            return kernels if wrap is None else wrap(kernels)

        with torch.inference_mode():
            self._model, kernels = choice.load(
                config, folder, kernels_of, torch_device, dtype, context_len, on_progress
            )
        num_blocks = memory.num_blocks(
            self._model.kv_shapes,
            torch_device,
            dtype,
            block_size=options.block_size,
            context_len=context_len,
            max_lanes=options.max_lanes,
            wanted=options.num_blocks,
            kv_memory=options.kv_memory,
        )
        self._caches = [
            kernels.new_cache(num_blocks, options.block_size, *shape, dtype) for shape in self._model.kv_shapes
        ]
        self.batch_dependent = self._model.batch_dependent + _plain(kernels)
        self._choose = _choose_with(kernels)
        self._chosen: Tensor | None = None
        """By the step launched last, where the logits are: the next one may be fed with it."""
        self._constraints = Constraints(self.facts, partial(read_vocabulary, self.facts, folder))
        self._graphs = _decode_graphs(self._model, kernels, self._caches, options, context_len)
        self.limits = ExecutorLimits(num_blocks, options.block_size, options.max_lanes, options.max_step_tokens)
        self.numerics = numerics.fingerprint(
            folder, dtype, self.device, platform.machine(), options.quantization, kernels.name, threads
        )
        on_progress(f"loaded {self.facts.model} in {time.monotonic() - started:.1f} s")

    def warm_up(self) -> None:
        """One small prefill and one decode, captured steps before them: libraries load, memory is touched."""
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.capture()
        size = self.limits.block_size
        num_tokens = min(size, self.limits.max_step_tokens, self.facts.context_len)
        self.launch(_warm_up_batch(num_tokens, num_tokens, size)).read()
        self.launch(_warm_up_batch(1, min(LONG_CONTEXT, self.facts.context_len), size)).read()

    def launch(self, batch: StepBatch) -> "LaunchedStep":
        """See ``Backend``. Raises StepError: fatal when the device has failed, not when memory does not suffice."""
        try:
            with torch.inference_mode():
                states = self._states(batch)
                last = batch.query_starts[[sample.row + 1 for sample in batch.samples]] - 1
                logits = self._model.logits(states, last)
                # On a device the masks are made while it computes: nothing before this has waited for it.
                masks = self._constraints.masks(batch.samples)
                sampled = sampling.sample(logits, batch.samples, self._choose, masks)
                told = [self._prompt_logprobs(states, batch, prompt) for prompt in batch.prompts]
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise StepError(f"out of memory in a step of {len(batch.token_ids)} tokens") from error
        except RuntimeError as error:
            if devices.has_failed(self._torch_device):
                raise StepError(f"the device failed: {error}", fatal=True) from error
            if "allocate memory" not in str(error):  # how torch's CPU allocator fails
                raise
            raise StepError(f"out of memory in a step of {len(batch.token_ids)} tokens") from error
        self._chosen = sampled.tokens
        return LaunchedStep(sampled, told)

    def _states(self, batch: StepBatch) -> States:
        captured = self._graphs.states(batch, self._chosen) if self._graphs is not None else None
        return captured or self._model.states(batch, self._caches, self.limits.block_size, self._chosen)

    def _prompt_logprobs(self, states: States, batch: StepBatch, prompt: PromptRow) -> bytes:
        """Records of a row's prompt tokens, a few at a time: their logits never take more than that many rows."""
        first = int(batch.query_starts[prompt.row])
        records = []
        for start in range(0, len(prompt.tokens), MAX_PROMPT_LOGITS):
            told = prompt.tokens[start : start + MAX_PROMPT_LOGITS].tolist()
            logits = self._model.logits(states, np.arange(first + start, first + start + len(told))).cpu().numpy()
            records += [
                logprobs.record(row, token, prompt.num_logprobs) for row, token in zip(logits, told, strict=True)
            ]
        return b"".join(records)

    def prepare(self, constraint: Constraint) -> None:
        """See ``Backend``."""
        self._constraints.prepare(constraint)

    def released(self, lane: int) -> None:
        """Only what its constraint had reached is kept of a lane."""
        self._constraints.released(lane)

    def taken(self, blocks: Sequence[int]) -> None:
        """Nothing to do: a block is written before it is read."""


class LaunchedStep:
    """See ``backend.Launched``. On a CPU it is done."""

    def __init__(self, sampled: sampling.Sampled, prompt_logprobs: list[bytes]) -> None:
        self._sampled, self._prompt_logprobs = sampled, prompt_logprobs

    @property
    def done(self) -> bool:
        return self._sampled.arriving.done

    def wait(self) -> None:
        self._sampled.arriving.wait()

    def read(self) -> StepOutput:
        """Raises StepError, fatal: a device that fails in the middle of a step computes nothing any more."""
        try:
            output = self._sampled.read()
        except RuntimeError as error:
            raise StepError(f"the device failed: {error}", fatal=True) from error
        output.prompt_logprobs = self._prompt_logprobs
        return output


def load(options: ExecutorOptions, on_progress: Callable[[str], None]) -> Backend:
    """Load the model. Raises ValueError, in words for the user, when it or the options cannot work."""
    return TorchBackend(options, on_progress)


def _context_len(wanted: int | None, trained: int) -> int:
    if wanted is not None and wanted > trained:
        raise ValueError(f"max-model-len {wanted} is above the model's context of {trained} tokens")
    return wanted or trained


def _decode_graphs(
    model: PagedModel, kernels: Kernels, caches: list[LayerCache], options: ExecutorOptions, context_len: int
) -> "DecodeGraphs | None":
    """Captured decode steps where model and kernels can be captured: ours, and Triton's, which few may import."""
    if not kernels.name.startswith("triton") or not isinstance(model, Llama):
        return None
    from services.executor.cuda_graphs import DecodeGraphs
    from services.executor.kernels.triton.kernels import TritonKernels

    if not isinstance(kernels, TritonKernels):  # something that measures stands between: it must see every call
        return None
    return DecodeGraphs(model, kernels, caches, options.block_size, options.max_lanes, context_len)


def _plain(kernels: Kernels) -> list[str]:
    """Plain torch pads the contexts of a step to one length, which moves the last bits of its sums."""
    return ["attention in plain torch"] if kernels.name == "reference" else []


def _choose_with(kernels: Kernels) -> sampling.Choose:
    """Tokens are chosen where the logits are."""
    if not kernels.name.startswith("triton"):
        return sampling.on_host
    from services.executor.kernels.triton import draw

    return draw.choose


def _facts(folder: Path, vocab_size: int, context_len: int) -> ModelFacts:
    return ModelFacts(
        model=folder.resolve().name,
        vocab_size=vocab_size,
        context_len=context_len,
        eos_token_ids=[token for token in end_tokens.end_token_ids(folder) if token < vocab_size],
        tokenizer_digest=end_tokens.tokenizer_digest(folder),
    )


def _warm_up_batch(num_tokens: int, context_len: int, block_size: int) -> StepBatch:
    """One row that computes the last ``num_tokens`` tokens of a context, all of which lies in block 0."""
    positions = np.arange(context_len - num_tokens, context_len, dtype=np.int32)
    token_ids = np.zeros(num_tokens, dtype=np.int32)
    said = np.zeros(context_len, dtype=np.int32)
    row = SampleRow(0, 0, 0, Sampling(temperature=1.0, top_p=0.9), context_len, said, context_len)
    return StepBatch(
        step=0,
        lanes=[0],
        token_ids=token_ids,
        positions=positions,
        slot_mapping=np.arange(num_tokens, dtype=np.int64),
        query_starts=np.array([0, num_tokens], dtype=np.int32),
        context_lens=np.array([context_len], dtype=np.int32),
        block_tables=np.zeros((1, -(-context_len // block_size)), dtype=np.int32),
        samples=[row],
    )
