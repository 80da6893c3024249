"""Tokens that a step takes from the one before it, on the device: the host has not read them, and need not.

Called by whatever brings a step's token ids to the device.
"""

from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.upload import upload


def feed(token_ids: Tensor, batch: StepBatch, before: Tensor | None) -> None:
    """Put the batch's fed tokens into its uploaded ``token_ids`` [T].

    ``before``: [S] int64, what the samples of the step before have become. One that failed is below 0; its lane has
    failed, so that any token will do.
    """
    if not len(batch.fed_tokens):
        return
    assert before is not None, "tokens are fed from a step that there was not"
    places, samples = upload((batch.fed_tokens, batch.fed_samples), token_ids.device)
    token_ids.index_copy_(0, places, before[samples].clamp_(min=0).to(token_ids.dtype))
