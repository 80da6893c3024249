"""Weights that a module multiplies with by itself, as routers do: their products become ours.

Used by ``hosted_replace``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from services.executor.kernels.interface import Kernels
from services.executor.model.hosted_rows import InvariantLinear, StepRows


class Owner:
    """A module with weights of its own, and what it does with them."""

    def __init__(self, kind: str, kernels: Kernels, rows: StepRows) -> None:
        self.kind, self._kernels, self._rows = kind, kernels, rows
        self.is_invariant = True
        """Until the module is seen to compute something else than products."""

    def product(self, weight: Tensor) -> InvariantLinear:
        """Of [columns out, columns in]. Never quantized: it decides which experts are asked."""
        return InvariantLinear(weight, None, self._kernels, self._rows, exact=True)


class OwnWeight(Tensor):
    """A parameter [columns out, columns in] whose product, ``F.linear``, is ours; anything else is torch's, and noted.

    The tensor is kept beside the product. They are small ones: a router has one column for each expert.
    """

    owner: Owner
    made: dict[Any, Any]
    """The product, and the same weight as other types."""

    @classmethod
    def of(cls, weight: Tensor, owner: Owner) -> "OwnWeight":
        own = weight.as_subclass(cls)
        own.owner, own.made = owner, {}
        return own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and len(args) > 1 and isinstance(args[1], cls) and args[1].ndim == 2:
                return args[1]._multiplied(args[0], *args[2:], **kwargs)
            if func is Tensor.float or (func is Tensor.type and isinstance(args[-1], torch.dtype)):
                return args[0]._cast(func, args)
            found = func(*args, **kwargs)
        is_fact = not isinstance(found, (Tensor, tuple, list)) or isinstance(found, torch.Size)
        is_vector = func is Tensor.squeeze and found.ndim == 1  # as harmless as any bias
        if not is_fact and not is_vector:
            for own in tree_leaves((args, kwargs)):
                if isinstance(own, cls):
                    own.owner.is_invariant = False
        return found

    def _multiplied(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if F.linear not in self.made:
            self.made[F.linear] = self.owner.product(self.as_subclass(Tensor))
        found: Tensor = self.made[F.linear](x)
        return found if bias is None else found + bias

    def _cast(self, func: Any, args: Any) -> "OwnWeight":
        key = (func, *args[1:])
        if key not in self.made:
            self.made[key] = OwnWeight.of(func(*args), self.owner)
        found: OwnWeight = self.made[key]
        return found
