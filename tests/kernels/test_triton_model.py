"""A whole model on the Triton kernels: its logits are those of plain torch, and padded decode steps change no bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.executor.batch import StepBatch
from services.executor.cuda_graphs import DecodeGraphs, sizes
from services.executor.kernels.interface import Kernels, LayerCache
from services.executor.kernels.reference import ReferenceKernels
from services.executor.kernels.triton.kernels import TritonKernels
from services.executor.model import config as model_config
from services.executor.model.llama import Llama
from services.executor.model.weights import Weights
from tests.fakes import tiny_models
from tests.fakes.steps import Row, step
from tests.fakes.triton_device import DEVICE

BLOCK_SIZE, NUM_BLOCKS = 4, 24


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=["llama, biases everywhere", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.reference(request.param), tmp_path_factory.mktemp("model"))


def loaded(folder: Path, kernels: Kernels) -> tuple[Llama, list[LayerCache]]:
    config = model_config.read(folder)
    model = Llama(config, Weights(folder, DEVICE, torch.float32), kernels, DEVICE)
    shape = (NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32)
    return model, [kernels.new_cache(*shape) for _ in range(config.num_layers)]


def steps() -> tuple[StepBatch, StepBatch]:
    """A prefill of three rows, then a decode of each."""
    tokens = [[5 + 3 * i + j for j in range(5 + i)] for i in range(3)]
    blocks = [list(range(7 * i, 7 * i + 3)) for i in range(3)]
    first = [Row(t, 0, len(t) - 1, b) for t, b in zip(tokens, blocks, strict=True)]
    return step(first, BLOCK_SIZE), step(
        [Row(t, len(t) - 1, 1, b) for t, b in zip(tokens, blocks, strict=True)], BLOCK_SIZE
    )


def test_logits_are_those_of_plain_torch(folder: Path) -> None:
    found, expected = loaded(folder, TritonKernels(DEVICE)), loaded(folder, ReferenceKernels(DEVICE))
    for batch in steps():
        logits, plain = (model.forward(batch, caches, BLOCK_SIZE) for model, caches in (found, expected))
        torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)


def test_a_captured_step_is_the_step_to_the_bit(folder: Path) -> None:
    kernels = TritonKernels(DEVICE)
    model, caches = loaded(folder, kernels)
    prefill, decode = steps()
    model.forward(prefill, caches, BLOCK_SIZE)
    before = [LayerCache(cache.keys.clone(), cache.values.clone()) for cache in caches]
    expected = model.forward(decode, before, BLOCK_SIZE)
    graphs = DecodeGraphs(model, kernels, caches, BLOCK_SIZE, max_rows=6, context_len=tiny_models.CONTEXT_LEN)
    graphs.capture()
    assert graphs.states(prefill) is None
    states = graphs.states(decode)
    assert states is not None
    assert len(states.residual) == 4
    assert torch.equal(model.logits(states, decode.query_starts[1:] - 1), expected)
    for cache, plain in zip(caches, before, strict=True):
        assert torch.equal(cache.keys, plain.keys)
        assert torch.equal(cache.values, plain.values)


def test_sizes_reach_every_number_of_rows() -> None:
    assert sizes(1) == [1]
    assert sizes(3) == [1, 2, 4]
    assert sizes(16) == [1, 2, 4, 8, 16]
    assert sizes(50) == [1, 2, 4, 8, 16, 32, 48, 64]
