"""Any other causal language model of transformers, on paged KV memory: its own code, with our attention and products.

Called by ``choice``. A step's tokens are one sequence to transformers; only our attention knows which request each
belongs to. Positions travel with the tokens. How rows are kept from each other is told in ``hosted_rows``.
"""

import inspect
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from services.executor.batch import StepBatch
from services.executor.kernels.choice import padded_head_dim
from services.executor.kernels.feed import feed
from services.executor.kernels.interface import Kernels, LayerCache
from services.executor.kernels.upload import upload
from services.executor.model.hosted_attention import NAME, Attending, Probe, Step, give_places
from services.executor.model.hosted_check import Check
from services.executor.model.hosted_config import HostedConfig
from services.executor.model.hosted_replace import replace
from services.executor.model.hosted_rows import StepRows, one_thread
from services.executor.model.paged import KvShape, States
from services.executor.model.weights import listed, weight_files

log = logging.getLogger(__name__)

KernelsOf = Callable[[int], Kernels]
"""Chooses kernels for a head size."""


class HostedModel:
    """A loaded model of transformers; see ``paged.PagedModel``."""

    def __init__(self, model: Any, seen: list[Attending], kernels: Kernels, config: HostedConfig, context_len: int):
        """Takes ``model`` over: its attention, products and rotary embeddings become ours."""
        self._kernels, self._device, self._vocab_size = kernels, model.device, config.vocab_size
        device = self._device
        self._rows = StepRows(device, torch.get_num_threads())
        self._step = Step(self._rows)
        head_dims = [padded_head_dim(device, attending.kv.head_dim) for attending in seen]
        self.kv_shapes = [
            KvShape(attending.kv.num_heads, head_dim) for attending, head_dim in zip(seen, head_dims, strict=True)
        ]
        give_places(seen, head_dims, self._step)
        self._owners = replace(model, kernels, self._rows, context_len)
        self._model, self._layers = model, model.get_decoder()
        self._compute = self._layers.forward
        self._layers.forward = self._computed_or_found
        self._output: Any = None
        """What the layers gave last, and whether it is to be given again."""
        self._found: Tensor | None = None

    @property
    def batch_dependent(self) -> list[str]:
        """See ``paged.PagedModel``. Known once the model has run."""
        kinds = sorted({owner.kind for owner in self._owners if not owner.is_invariant})
        found = [f"{kind}, which computes with weights of its own" for kind in kinds]
        if self._device.type != "cpu":
            found.append("what is between products, as the CUDA library computes it")
        return found

    def states(
        self, batch: StepBatch, caches: list[LayerCache], block_size: int, before: Tensor | None = None
    ) -> States:
        """See ``paged.PagedModel``. What is told here is after the last norm."""
        self._step.attention = self._kernels.step(batch, block_size)
        self._step.caches = caches
        self._rows.start(len(batch.token_ids))
        token_ids, positions = upload([batch.token_ids, batch.positions], self._device)
        feed(token_ids, batch, before)
        with one_thread(self._rows):
            self._output = self._layers(
                input_ids=self._rows.padded(token_ids.long())[None],
                position_ids=self._rows.padded(positions.long())[None],
                use_cache=False,
            )
        return States(None, self._output.last_hidden_state[0, : self._rows.real])

    def logits(self, states: States, tokens: NDArray[np.integer[Any]]) -> Tensor:
        """See ``paged.PagedModel``. Runs the model's own head, for which its layers' result is found ready."""
        if not len(tokens):
            return torch.empty(0, self._vocab_size, device=self._device)
        (picked,) = upload([tokens], self._device)
        self._rows.start(len(tokens))
        self._found = self._rows.padded(states.residual[picked])[None]
        try:
            with one_thread(self._rows):
                nothing = torch.zeros(1, self._rows.total, dtype=torch.long, device=self._device)
                logits: Tensor = self._model(input_ids=nothing, use_cache=False).logits
        finally:
            self._found = None
        return logits[0, : len(tokens)].float()

    def _computed_or_found(self, *arguments: Any, **named: Any) -> Any:
        if self._found is None:
            return self._compute(*arguments, **named)
        return type(self._output)(**self._output | {"last_hidden_state": self._found})


def load(
    folder: Path,
    config: HostedConfig,
    kernels_of: KernelsOf,
    device: torch.device,
    dtype: torch.dtype,
    context_len: int,
) -> tuple[HostedModel, Kernels]:
    """Load and take over the model, and compare it with itself. Raises ValueError, naming it, when it cannot be."""
    model = _opened(folder, dtype).to(device)
    try:
        check = Check(model, config.vocab_size, context_len, device)
        seen = _probed(model, config, device)
        kernels = kernels_of(max(padded_head_dim(device, attending.kv.head_dim) for attending in seen))
        hosted = HostedModel(model, seen, kernels, config, context_len)
        check.compare(hosted, kernels, dtype)
    except Exception as error:  # a model's own code raises whatever it does not expect
        raise ValueError(f"unsupported architecture {config.architecture}: {error}") from error
    if hosted.batch_dependent:
        log.warning(
            "%s: bits may depend on what else is in a step in %s",
            config.architecture,
            ", ".join(hosted.batch_dependent),
        )
    return hosted, kernels


def _opened(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model, its weights mapped from the files. Raises ValueError naming tensors that are missing."""
    weight_files(folder)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",  # the others refuse some widths
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise ValueError(f"{folder} cannot be loaded: {error}") from error
    model, report = opened
    lacking = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"], *report["error_msgs"]]))
    if lacking:
        raise ValueError(f"the weights lack or misshape {listed(lacking)}")
    if report["unexpected_keys"]:
        log.warning(
            "the weights hold tensors that this model does not use: %s", listed(sorted(report["unexpected_keys"]))
        )
    return model.eval()


def _probed(model: Any, config: HostedConfig, device: torch.device) -> list[Attending]:
    """The modules that attend, in order; our attention is set from here on. Raises ValueError for what we cannot do."""
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise ValueError("it takes no positions")
    model.set_attn_implementation(NAME)
    probe = Probe(model)
    with torch.inference_mode():
        ids = torch.arange(2, device=device)[None]
        model.get_decoder()(input_ids=ids, position_ids=ids, use_cache=False)
    if len(probe.seen) != config.num_layers:
        raise ValueError(f"{len(probe.seen)} of its {config.num_layers} layers attend through transformers' interface")
    if config.windows_expected and not any(attending.window for attending in probe.seen):
        raise ValueError("its layers do not tell their sliding window")
    _forget_unused_places(model, probe)
    return probe.seen


def _forget_unused_places(model: nn.Module, probe: Probe) -> None:
    for module in model.modules():
        if not any(attending.module is module for attending in probe.seen):
            del module.paged_place
