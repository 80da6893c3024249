"""The default model at long prompts, up to its whole context, in float32: logits equal transformers'."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.executor.kernels.choice import choose
from services.executor.model import choice
from tests.fakes.steps import Row, step
from tools import model as model_folders

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PIECE = 512


def text_tokens(folder: Path) -> np.ndarray:
    """The documentation of this project."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [file.read_text() for file in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))]
    return np.array(tokenizer.encode("".join(texts)), np.int32)


def largest_difference(folder: Path, num_tokens: int) -> float:
    """Over all positions, in shares of the largest logit; ours in pieces, transformers' whole."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = choice.read(folder)
    assert num_tokens <= config.context_len
    ours, kernels = choice.load(
        config,
        folder,
        lambda head_dim: choose(CPU, torch.float32, head_dim, BLOCK_SIZE),
        CPU,
        torch.float32,
        config.context_len,
        lambda line: None,
    )
    tokens = text_tokens(folder)[:num_tokens]
    assert len(tokens) == num_tokens
    blocks = np.random.default_rng(2).permutation(-(-num_tokens // BLOCK_SIZE)).tolist()
    caches = [kernels.new_cache(len(blocks), BLOCK_SIZE, *shape, torch.float32) for shape in ours.kv_shapes]
    differences, largest = [], []
    with torch.inference_mode():
        whole = model.model(torch.from_numpy(tokens).long()[None], use_cache=False).last_hidden_state[0]
        for start in range(0, num_tokens, PIECE):
            count = min(PIECE, num_tokens - start)
            states = ours.states(step([Row(tokens, start, count, blocks)], BLOCK_SIZE), caches, BLOCK_SIZE)
            expected = model.lm_head(whole[start : start + count])
            differences.append((ours.logits(states, np.arange(count)) - expected).abs().max())
            largest.append(expected.abs().max())
    return float(max(differences) / max(largest))


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_prompt_of_a_thousand_tokens(default_model: Path) -> None:
    assert largest_difference(default_model, 1000) <= 1e-4


@pytest.mark.model
@pytest.mark.soak
def test_a_prompt_of_the_whole_context(default_model: Path) -> None:
    difference = largest_difference(default_model, 8192)
    print(f"largest difference at 8192 tokens: {difference:.1e} of the largest logit")
    assert difference <= 1e-4


@pytest.fixture(scope="module")
def default_model() -> Path:
    return model_folders.cached("default", lambda line: None)
