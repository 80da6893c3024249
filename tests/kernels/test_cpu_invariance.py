"""A small ``make invariance``: rows have the same bits alone and in every crowd, on a tiny model, in every mode."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.fakes import tiny_models
from tools import invariance, invariance_experts
from tools.invariance_rows import rowwise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads and widths the compiled kernels take."""
    torch.manual_seed(0)
    settings = tiny_models.CONFIGS["llama, grouped heads"].to_dict() | {"head_dim": 16, "hidden_size": 72}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**settings))
    return tiny_models.save(model, tmp_path_factory.mktemp("invariance"))


@pytest.mark.parametrize("mode", invariance.MODES)
def test_rows_do_not_depend_on_their_neighbours(folder: Path, mode: str) -> None:
    torch.manual_seed(0)
    findings = list(invariance.check(folder, mode, 300, 600, np.random.default_rng(0)))
    assert len(findings) >= 6
    assert [finding for finding in findings if finding.differing or not finding.rows] == []


@pytest.mark.parametrize("mode", invariance.MODES)
def test_experts_do_not_depend_on_neighbours(mode: str) -> None:
    layer = invariance_experts.Layer(*invariance.MODES[mode])
    finding = invariance_experts.check(layer, 100, np.random.default_rng(0))
    assert (finding.rows, finding.differing) == (100, 0)


def test_sampling_does_not_depend_on_neighbours() -> None:
    assert not invariance.sampled(300, 1000, np.random.default_rng(0)).differing


def test_a_difference_is_found() -> None:
    def crowded(x: torch.Tensor) -> torch.Tensor:
        return x * 1.0 if len(x) < 5 else x * 1.0000001 + 1e-7

    assert rowwise("", crowded, torch.randn(50, 8), np.random.default_rng(0)).differing
