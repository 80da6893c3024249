"""Layers of experts: each row's bits are its own, whoever else asks the same experts; ties in the router included."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from services.executor.kernels.choice import choose
from services.executor.kernels.interface import Quantization
from services.executor.model import hosted_experts
from services.executor.model.hosted_replace import replace
from services.executor.model.hosted_rows import StepRows, one_thread
from services.executor.model.hosted_weights import Owner
from tests.fakes import hosted_models, tiny_models
from tests.fakes.paged import CPU
from tools.invariance_rows import rowwise

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 3000
LAYERS = ["mixtral, experts", "qwen2-moe, shared expert", "deepseek3, experts in groups", "granite-moe, experts"]


class Layer:
    """The last layer of a tiny model that has experts, its products replaced."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, quantization: Quantization = "none") -> None:
        model = tiny_models.made(hosted_models.SERVED[name]).to(dtype)
        self.rows = StepRows(CPU, 1)
        self.block = next(
            module
            for module in reversed(list(model.modules()))
            if any("Experts" in type(child).__name__ for child in module.children())
        )
        self.router = next(m for m in self.block.children() if "Router" in type(m).__name__)
        with torch.no_grad():
            self.router.weight[1] = self.router.weight[0]  # ties in every row
        self.owners: list[Owner] = []
        self._replace = lambda: replace(model, choose(CPU, dtype, 16, 16, quantization), self.rows, 16)

    def take(self) -> "Layer":
        self.owners = self._replace()
        return self

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden]"""
        self.rows.start(len(x))
        with one_thread(self.rows):
            found: Tensor = self.block(self.rows.padded(x)[None])
        return found[0, : len(x)]

    @torch.inference_mode()
    def chosen(self, x: Tensor) -> Tensor:
        """What the router tells of each row, all its numbers side by side."""
        self.rows.start(len(x))
        with one_thread(self.rows):
            found = self.router(self.rows.padded(x))
        return torch.cat([part[: len(x)].double() for part in found], dim=1)


def some_rows(dtype: torch.dtype) -> Tensor:
    """Random ones, and some of zeros, for which all experts tie."""
    rows = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    rows[::50] = 0
    return rows


CASES: list[tuple[str, torch.dtype, Quantization]] = [
    *((name, torch.float32, "none") for name in LAYERS),
    *((name, torch.bfloat16, "none") for name in LAYERS[:2]),
    *((name, torch.bfloat16, "int8") for name in LAYERS[1:3]),
]


@pytest.mark.parametrize(("name", "dtype", "quantization"), CASES)
def test_a_row_has_the_same_bits_alone_and_in_crowds(name: str, dtype: torch.dtype, quantization: Quantization) -> None:
    layer = Layer(name, dtype, quantization).take()
    finding = rowwise(name, layer, some_rows(dtype), np.random.default_rng(2), turns=1)
    assert not finding.differing
    assert all(owner.is_invariant for owner in layer.owners)


@pytest.mark.parametrize("name", LAYERS)
def test_a_router_chooses_for_a_row_what_it_chooses_for_it_alone(name: str) -> None:
    layer = Layer(name).take()
    finding = rowwise(name, layer.chosen, some_rows(torch.float32), np.random.default_rng(2), turns=1)
    assert not finding.differing


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_transformers_does(name: str) -> None:
    layer = Layer(name)
    x = some_rows(torch.float32)[:77]
    expected = layer(x)
    assert torch.allclose(layer.take()(x), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_the_weights_of_experts_are_held_once() -> None:
    layer = Layer("mixtral, experts").take()
    (experts,) = (module for module in layer.block.children() if hosted_experts.can_take(module))
    assert list(experts.parameters()) == []


def test_what_a_router_does_besides_products_is_noted() -> None:
    layer = Layer("mixtral, experts").take()
    router: nn.Module = layer.router
    _ = router.weight.dtype, router.weight.shape
    assert all(owner.is_invariant for owner in layer.owners)
    _ = torch.cat([router.weight, router.weight])
    assert [owner.kind for owner in layer.owners if not owner.is_invariant] == ["MixtralTopKRouter"]
