"""What the fake model says where a constraint allows only some tokens. Called by ``fake``; pure.

A text ends sooner or later: every fourth token, by its hash, is one that may end a string, a list, an object or all of
it, if one is allowed. Elsewhere the fake says what it would have said anyway, if it may, else any token that it may.
"""

from services.executor.batch import SampleRow
from services.executor.constraints import Allowed, unpacked
from shared import fake_model
from shared.wire import tokens

CLOSING = frozenset([*b'"]}', *fake_model.EOS_TOKEN_IDS])


def constrained_choice(allowed: Allowed, ended: bool, said: int, hash_: int, sample: SampleRow) -> int | None:
    """A token among ``allowed``, ``said`` if it fits; None when the masks of ``min_tokens`` leave none.

    ``ended``: nothing but an end token may follow.
    """
    sampling = sample.sampling
    ids: list[int] = unpacked(allowed, fake_model.VOCAB_SIZE).nonzero()[0].tolist()
    if not ended:
        shunned = {i for i, value in zip(*_bias(sample), strict=True) if value < 0}
        ids = [token for token in ids if token not in shunned] or ids
        if sample.position - sample.num_prompt < sampling.min_tokens:
            masked = set(tokens.unpack(sampling.stop_token_ids))
            ids = [token for token in ids if token not in masked]
    if not ids:
        return None
    draw, kind = divmod(hash_, 4)
    closing = [token for token in ids if token in CLOSING] if kind == 0 else []
    if closing:
        return closing[draw % len(closing)]
    return said if said in ids else ids[draw % len(ids)]


def _bias(sample: SampleRow) -> tuple[list[int], list[float]]:
    return tokens.unpack(sample.sampling.bias_ids), tokens.unpack_floats(sample.sampling.bias_values)
