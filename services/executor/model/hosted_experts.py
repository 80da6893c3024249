"""Layers of experts as transformers' models call them, through the one function its experts interface asks for.

Called by ``hosted_replace``. transformers multiplies tokens in groups or one by one, as it finds them; here each expert
is two products of ours, and what a token's experts give is added in the order of their numbers, in float32: so a
token's bits do not depend on which other tokens chose the same experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from services.executor.kernels.interface import Kernels, Linear
from services.executor.model.hosted_rows import StepRows, all_threads, whole

NAME = "paternoster"
"""Of our experts in transformers' registry."""
_PLACE = "paternoster_experts"


def _compute(module: nn.Module, hidden_TC: Tensor, chosen_TK: Tensor, shares_TK: Tensor) -> Tensor:
    """[T, C] -> [T, C]; what transformers calls an experts function. K experts were chosen for each token."""
    experts: Experts = getattr(module, _PLACE)
    return experts.compute(hidden_TC, chosen_TK, shares_TK)


ExpertsInterface.register(NAME, _compute)


def can_take(module: nn.Module) -> bool:
    """Whether ``module`` is a layer of experts that calls our function."""
    marked = all(hasattr(module, mark) for mark in ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm"))
    return marked and getattr(module.config, "_experts_implementation", None) == NAME


def take(module: nn.Module, kernels: Kernels, rows: StepRows) -> None:
    """Let ``module`` compute with our products from now on, and forget its own weights."""
    setattr(module, _PLACE, Experts(module, kernels, rows))


class Experts:
    """What one layer's experts compute. E experts, S pairs of a token and an expert it chose."""

    def __init__(self, module: Any, kernels: Kernels, rows: StepRows) -> None:
        self._rows = rows
        self._up = _products(module, "gate_up_proj" if module.has_gate else "up_proj", kernels)
        self._down = _products(module, "down_proj", kernels)
        self._activate = module._apply_gate if module.has_gate else module.act_fn
        self._norm = module.post_expert_norm if module.has_post_expert_norm else None

    def compute(self, hidden_TC: Tensor, chosen_TK: Tensor, shares_TK: Tensor) -> Tensor:
        """See ``_compute``. Padding rows choose experts too, and are passed over: they stay zero."""
        hidden_RC = self._rows.only_real(hidden_TC)
        chosen_RK, order_RK = chosen_TK[: len(hidden_RC)].sort(dim=1)
        shares_RK = shares_TK[: len(hidden_RC)].gather(1, order_RK).float()
        found_RKC = self._found(hidden_RC, chosen_RK)
        total_RC = found_RKC[:, 0].float() * shares_RK[:, :1]
        for nth in range(1, chosen_RK.shape[1]):
            total_RC += found_RKC[:, nth].float() * shares_RK[:, nth : nth + 1]
        return F.pad(total_RC.to(hidden_TC.dtype), (0, 0, 0, len(hidden_TC) - len(hidden_RC)))

    def _found(self, hidden_RC: Tensor, chosen_RK: Tensor) -> Tensor:
        """[R, K, C]: what each chosen expert gives for each token, one expert after the other."""
        num_chosen = chosen_RK.shape[1]
        order_S = chosen_RK.flatten().argsort(stable=True)
        counts = chosen_RK.flatten().bincount(minlength=len(self._up)).tolist()
        inner = self._multiplied(self._up, hidden_RC[order_S // num_chosen], counts)
        inner = self._activate(inner)
        found = self._multiplied(self._down, inner[: len(order_S)].contiguous(), counts)
        if self._norm is not None:
            found = self._norm(found)
        back_SC = torch.empty_like(found[: len(order_S)])
        back_SC[order_S] = found[: len(order_S)]
        return back_SC.view(*chosen_RK.shape, -1)

    def _multiplied(self, products: Sequence[Linear], x_SC: Tensor, counts: list[int]) -> Tensor:
        """Each expert's rows of ``x`` times its weights; padded with zeros to whole vectors."""
        with all_threads(self._rows):
            parts = [
                product(part) for product, part in zip(products, torch.split(x_SC, counts), strict=True) if len(part)
            ]
        padding = parts[0].new_zeros(whole(len(x_SC)) - len(x_SC), parts[0].shape[1])
        return torch.cat([*parts, padding])


def _products(module: Any, name: str, kernels: Kernels) -> list[Linear]:
    """The experts' products with the weights of that name, which the module forgets: so they are held once."""
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    setattr(module, name, None)
    return [
        kernels.linear(weight.T.contiguous() if module.is_transposed else weight, bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]
