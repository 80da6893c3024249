"""Any JSON gives a request or a 400 that names the field."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.errors import ApiError
from services.gateway.api.prompts import messages_of, prompts_of
from services.gateway.api.schema import ChatRequest, CompletionRequest, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*ChatRequest.__struct_fields__, "logit_bias", "logprobs", "tools", "response_format", "n"})


def status_of(read: Callable[[], object]) -> int:
    try:
        read()
    except ApiError as error:
        return error.status
    return 200


@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_fields_give_a_request_or_a_400(fields: dict[str, Any]) -> None:
    assert status_of(lambda: messages_of(parse(json.dumps(fields).encode(), ChatRequest).messages)) in (200, 400)


@given(body=st.binary(max_size=40))
def test_any_bytes_give_a_request_or_a_400(body: bytes) -> None:
    assert status_of(lambda: prompts_of(parse(body, CompletionRequest).prompt)) in (200, 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stream_options": {"include_usage": 5}, "stream": True}, "stream_options"),
        ({"stream_options": {}}, "stream_options"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids"),
        ({"logprobs": 5}, "logprobs"),
        ({"best_of": True}, "best_of"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json"}}, "response_format"),
    ],
)
def test_the_field_at_fault_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(json.dumps(fields).encode(), ChatRequest)
    assert raised.value.param == param
    assert param in raised.value.message


def test_null_is_as_absent() -> None:
    fields = dict.fromkeys(FIELDS)
    assert parse(json.dumps(fields).encode(), ChatRequest) == ChatRequest()
