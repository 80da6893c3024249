"""What no executor could sample by is told apart before it reaches one."""

import math

import msgspec
import pytest

from services.scheduler.core.admission import judge
from services.scheduler.core.request import Request
from shared import fake_model
from shared.wire import tokens
from shared.wire.gateway import Submit
from shared.wire.sampling import MAX_CONSTRAINT_CHARS, Constraint, Sampling, problem_of

FACTS = fake_model.facts()
V = FACTS.vocab_size
_LONGEST = Constraint("regex", "a" * MAX_CONSTRAINT_CHARS)
BIAS = Sampling(bias_ids=tokens.pack([3, V - 1]), bias_values=tokens.pack_floats([-100.0, 1.5]))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_k": 2**40},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.5},
        {"min_tokens": 2**63},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"frequency_penalty": -math.inf},
        {"num_logprobs": V + 1},
        {"num_logprobs": -2},
        {"stop_token_ids": b"abc"},
        {"stop_token_ids": tokens.pack([V])},
        {"bias_ids": b"abc"},
        {"bias_ids": tokens.pack([V, 1])},
        {"bias_ids": tokens.pack([1, 1])},
        {"bias_values": tokens.pack_floats([1.0])},
        {"bias_values": tokens.pack_floats([1.0, math.nan])},
        {"constraint": Constraint("regex", "a" * (MAX_CONSTRAINT_CHARS + 1))},
    ],
    ids=lambda fields: str(fields)[:80],
)
def test_a_foreign_gateways_sampling_broke_whole_steps(fields: dict[str, object]) -> None:
    sampling = msgspec.structs.replace(BIAS, **fields)
    assert problem_of(sampling, V)
    request = Request("g", Submit("r", tokens.pack([1]), sampling, 5), 0)
    refusal = judge(request, FACTS, 0)
    assert refusal is not None
    assert refusal.code == "invalid"


def test_what_gateways_send_is_fine() -> None:
    for sampling in (
        Sampling(),
        BIAS,
        Sampling(2.0, V, 1e-9, 1.0, 2**63 - 1, 2**31 - 1, num_logprobs=V, constraint=_LONGEST),
    ):
        assert problem_of(sampling, V) is None
