"""What int8 weights cost in quality: perplexity of the default model on this repository's own docs."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from services.executor.kernels.choice import choose
from services.executor.kernels.interface import Quantization
from services.executor.model import config as model_config
from services.executor.model.llama import Llama
from services.executor.model.weights import Weights
from tests.fakes.steps import Row, step
from tools import model as model_folders

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE, WINDOW = 16, 512


def perplexity(folder: Path, tokens: np.ndarray, quantization: Quantization) -> float:
    """Of ``tokens`` in windows of 512, the first token of each unscored."""
    config = model_config.read(folder)
    kernels = choose(CPU, torch.bfloat16, config.head_dim, BLOCK_SIZE, quantization)
    num_blocks = WINDOW // BLOCK_SIZE
    shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    total, count = 0.0, 0
    with torch.inference_mode():
        model = Llama(config, Weights(folder, CPU, torch.bfloat16), kernels, CPU)
        caches = [kernels.new_cache(*shape, torch.bfloat16) for _ in range(config.num_layers)]
        for start in range(0, len(tokens) - 1, WINDOW):
            window = tokens[start : start + WINDOW]
            states = model.states(
                step([Row(window, 0, len(window), range(num_blocks))], BLOCK_SIZE), caches, BLOCK_SIZE
            )
            logits = model.logits(states, np.arange(len(window) - 1))
            following = torch.from_numpy(window[1:].astype(np.int64))
            total += float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))
            count += len(following)
    return math.exp(total / count)


def compare(num_bytes: int, most: float) -> None:
    """``most``: by what share int8's perplexity may differ."""
    folder = model_folders.cached("default", lambda _: None)
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))[:num_bytes]
    assert len(text) == num_bytes
    tokens = np.array(AutoTokenizer.from_pretrained(folder).encode(text), dtype=np.int32)
    exact, quantized = (perplexity(folder, tokens, quantization) for quantization in ("none", "int8"))
    assert abs(quantized / exact - 1) < most, f"{len(tokens)} tokens: bfloat16 {exact:.3f}, int8 {quantized:.3f}"


@pytest.mark.model
@pytest.mark.timeout(600)
def test_int8_perplexity_stays_near_bfloat16s() -> None:
    compare(10_000, most=0.02)


@pytest.mark.model
@pytest.mark.soak
def test_int8_perplexity_on_fifty_kilobytes() -> None:
    compare(50_000, most=0.01)
