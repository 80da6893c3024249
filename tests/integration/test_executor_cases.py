"""EXEC cases of other servers' failures: long prompt logprobs, odd batches, the same text in a crowd."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from services.executor.backend import StepError
from services.executor.backends import torch_backend
from services.executor.backends.torch_backend import TorchBackend
from services.executor.batch import PromptRow, StepBatch
from services.executor.kernels.interface import Quantization
from shared.wire.sampling import Sampling
from tests.fakes import hosted_models, tiny_models
from tests.fakes.steps import Row, step
from tests.integration.test_torch_backend import BLOCK_SIZE, Request, backend_of, generate

MODES: list[tuple[str, Quantization]] = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.reference("qwen3"), tmp_path_factory.mktemp("models"))  # heads of 16: compiled


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(4, 130, int(draw.integers(1, 50))).tolist() for _ in range(count)]


def prompt_step(num_tokens: int, lanes: int) -> StepBatch:
    """Each lane computes one prompt and tells the logprobs of all of it."""
    tokens = np.arange(num_tokens, dtype=np.int32) % 100 + 4
    needed = -(-num_tokens // BLOCK_SIZE)
    rows = [Row(tokens, 0, num_tokens, range(i * needed, (i + 1) * needed)) for i in range(lanes)]
    batch = step(rows, BLOCK_SIZE)
    batch.prompts.extend(PromptRow(i, i, 0, 5, 1, tokens[1:]) for i in range(lanes))
    return batch


def test_exec_37_prompt_logprobs_of_long_prompts_hold_few_logits_at_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(tiny)
    held: list[int] = []
    logits = backend._model.logits

    def counting(states: object, tokens: np.ndarray) -> torch.Tensor:
        held.append(len(tokens))
        return logits(states, tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_backend, "MAX_PROMPT_LOGITS", 16)
    monkeypatch.setattr(backend._model, "logits", counting)
    output = backend.launch(prompt_step(120, 8)).read()
    assert len(output.tokens) == len(output.prompt_logprobs) == 8
    assert not output.failures
    assert max(held) <= 16


def test_exec_37_out_of_memory_in_one_step_is_that_steps_alone(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(tiny)
    batch = prompt_step(100, 4)
    expected = backend.launch(batch).read()

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(backend._model, "logits", fail)
        with pytest.raises(StepError) as caught:
            backend.launch(batch).read()
    assert not caught.value.fatal
    again = backend.launch(batch).read()
    assert (again.tokens, again.prompt_logprobs) == (expected.tokens, expected.prompt_logprobs)


def texts_of(backend: TorchBackend, chosen: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    return generate(backend, [Request(list(p), n) for p, n in zip(chosen, lengths, strict=True)], 64)


@pytest.mark.parametrize(("dtype", "quantization"), MODES)
def test_exec_38_batches_of_any_size_give_each_its_own_text(tiny: Path, dtype: str, quantization: Quantization) -> None:
    """Batches of 1 to 9, whose requests leave in the middle; blocks that nobody was given stay as they were."""
    backend = backend_of(tiny, dtype=dtype, quantization=quantization)
    nine = prompts(9)
    lengths = [3, 9, 5, 12, 4, 7, 12, 6, 10]
    alone = [texts_of(backend, [p], [n])[0] for p, n in zip(nine, lengths, strict=True)]
    for size in (1, 2, 3, 5, 7, 8, 9):
        for cache in backend._caches:
            for part in cache:
                part.fill_(77.0)
        assert texts_of(backend, nine[:size], lengths[:size]) == alone[:size]
        for cache in backend._caches:
            for part in cache:
                untouched = (part == 77.0).flatten(1).all(1)
                assert int(untouched.sum()) >= backend.limits.num_blocks - 5 * size


@pytest.mark.parametrize("name", ["gemma3, window in some layers", "qwen3-moe, experts"])
@pytest.mark.parametrize(("dtype", "quantization"), MODES)
def test_exec_38_a_hosted_model_gives_each_its_own_text(
    tmp_path: Path, dtype: str, quantization: Quantization, name: str
) -> None:
    """Through transformers' code."""
    config = hosted_models.SERVED[name]
    backend = backend_of(tiny_models.save(tiny_models.made(config), tmp_path), dtype=dtype, quantization=quantization)
    assert backend.batch_dependent == []
    lengths = [3, 9, 5, 12, 4]
    five = prompts(5)
    alone = [texts_of(backend, [p], [n])[0] for p, n in zip(five, lengths, strict=True)]
    assert texts_of(backend, five, lengths) == alone


@pytest.mark.parametrize(("dtype", "quantization"), MODES)
def test_exec_39_the_same_greedy_request_gives_the_same_text_alone_and_amid_load(
    tiny: Path, dtype: str, quantization: Quantization
) -> None:
    backend = backend_of(tiny, dtype=dtype, quantization=quantization)
    prompt = prompts(1, seed=8)[0]
    (expected,) = texts_of(backend, [prompt], [16])
    for _ in range(19):
        assert texts_of(backend, [prompt], [16]) == [expected]
    for turn in range(20):
        load = [
            Request(p, 8, Sampling(temperature=1.0, seed=i), admitted_at=i % 4)
            for i, p in enumerate(prompts(8, seed=100 + turn))
        ]
        ours = Request(list(prompt), 16, admitted_at=turn % 5)
        crowd = [*load[: turn % 8], ours, *load[turn % 8 :]]
        assert generate(backend, crowd, 40)[turn % 8] == expected
