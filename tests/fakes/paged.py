"""A loaded model with KV memory of its own, fed prompts in pieces, and what transformers gives for them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.executor.kernels.interface import Kernels
from services.executor.kernels.reference import ReferenceKernels
from services.executor.model import choice
from shared.wire.sampling import Sampling
from tests.fakes.steps import Row, step

CPU = torch.device("cpu")
NUM_BLOCKS = 200


class Paged:
    """Blocks are dealt in a scattered order and hold NaN before they are written."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        kernels_of: choice.KernelsOf = lambda head_dim: ReferenceKernels(CPU),
        block_size: int = 4,
    ) -> None:
        self.block_size = block_size
        self.config = choice.read(folder)
        kernels: Kernels
        self.model, kernels = choice.load(
            self.config, folder, kernels_of, CPU, dtype, self.config.context_len, lambda line: None
        )
        self.caches = [kernels.new_cache(NUM_BLOCKS, block_size, *shape, dtype) for shape in self.model.kv_shapes]
        for cache in self.caches:
            for part in cache:
                part.fill_(float("nan"))
        self.free = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()

    def logits(self, prompts: list[list[int]], cuts: list[int]) -> list[Tensor]:
        """Logits after each token of each prompt; ``cuts`` are the sizes of pieces, in turn."""
        blocks = [[self.free.pop() for _ in range(-(-len(prompt) // self.block_size))] for prompt in prompts]
        done = [0] * len(prompts)
        found: list[list[Tensor]] = [[] for _ in prompts]
        turn = 0
        while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
            rows, who = [], []
            for i, prompt in enumerate(prompts):
                size = min(cuts[(turn + i) % len(cuts)], len(prompt) - done[i])
                if size:
                    rows.append(Row(prompt, done[i], size, blocks[i], Sampling()))
                    who.append(i)
                    done[i] += size
            turn += 1
            batch = step(rows, self.block_size)
            with torch.inference_mode():
                states = self.model.states(batch, self.caches, self.block_size)
                logits = self.model.logits(states, np.arange(len(batch.token_ids)))
            for i, part in zip(who, torch.split(logits, np.diff(batch.query_starts).tolist()), strict=True):
                found[i].append(part)
        self.free += [block for row in blocks for block in row]
        return [torch.cat(parts) for parts in found]


def reference_logits(model: torch.nn.Module, prompt: list[int]) -> Tensor:
    """transformers' own, after each token."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within 1e-4 of the largest logit."""
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
