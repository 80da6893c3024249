"""Puts our products, experts and rotary tables into a model of transformers. Called by ``hosted``."""

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.executor.kernels.interface import Kernels
from services.executor.model import hosted_experts
from services.executor.model.hosted_rows import InvariantLinear, RotaryTable, StepRows
from services.executor.model.hosted_weights import Owner, OwnWeight


def replace(model: Any, kernels: Kernels, rows: StepRows, num_positions: int) -> list[Owner]:
    """Put the invariant parts in place, one by one, so that weights are never held twice.

    Returns what multiplies with weights of its own. Whether that is all it does with them is known once it has run.
    """
    if model._can_set_experts_implementation():
        model.set_experts_implementation(hosted_experts.NAME)
    owners = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear or type(child) is Conv1D:
                setattr(parent, name, _invariant(child, kernels, rows))
            elif type(child).__name__.endswith("RotaryEmbedding") and not isinstance(parent, RotaryTable):
                setattr(parent, name, RotaryTable(child, num_positions))
            elif hosted_experts.can_take(child):
                hosted_experts.take(child, kernels, rows)
            elif not isinstance(child, nn.Embedding) and (own := _own_weights(child)):
                owners.append(Owner(type(child).__name__, kernels, rows))
                for own_name, weight in own.items():
                    delattr(child, own_name)
                    setattr(child, own_name, OwnWeight.of(weight, owners[-1]))
    return owners


def _invariant(layer: Any, kernels: Kernels, rows: StepRows) -> InvariantLinear:
    bias: Tensor | None = layer.bias
    weight: Tensor = layer.weight.detach()
    weight = weight.T.contiguous() if type(layer) is Conv1D else weight
    return InvariantLinear(weight, None if bias is None else bias.detach(), kernels, rows)


def _own_weights(module: nn.Module) -> dict[str, Tensor]:
    """What ``module`` holds by itself in the way of weights."""
    parameters = module.named_parameters(recurse=False)
    return {name: parameter.detach() for name, parameter in parameters if parameter.ndim > 1}
