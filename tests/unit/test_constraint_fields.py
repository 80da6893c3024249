"""Every way to say what the output must be comes down to one constraint, or is refused by the field's name."""

import functools
import json
from typing import Any

import pytest

from services.gateway.api.constraints import constraint_of
from services.gateway.api.errors import ApiError
from services.gateway.api.json_bounds import MAX_DEPTH
from services.gateway.api.schema import ChatRequest, CompletionRequest, parse
from services.gateway.api.settings import NEVER, settings_of
from shared import fake_model
from shared.wire import tokens
from shared.wire.sampling import MAX_CONSTRAINT_CHARS, Constraint

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'
JSON = Constraint("json_schema", SCHEMA_TEXT)
OBJECT = Constraint("json_schema", '{"type":"object"}')
REGEX = Constraint("regex", "[0-9]+")
CHOICE = Constraint("lark", 'start: "yes" | "n\\"o\\n\\u00e9"')
LARK = Constraint("lark", 'start: "a"+')


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, JSON),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": SCHEMA, "a": 1}}},
            JSON,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json": SCHEMA_TEXT, "regex": None}}, JSON),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"regex": "[0-9]+"}}, REGEX),
        ({"structured_outputs": {"choice": ["yes", 'n"o\né']}}, CHOICE),
        ({"structured_outputs": {"grammar": 'start: "a"+'}}, LARK),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": SCHEMA_TEXT}, JSON),
        ({"guided_regex": "[0-9]+", "response_format": {"type": "text"}}, REGEX),
        ({"guided_choice": ["yes", 'n"o\né']}, CHOICE),
        ({"guided_grammar": 'start: "a"+', "structured_outputs": {}}, LARK),
    ],
    ids=str,
)
def test_all_ways_to_ask(kind: type[Any], fields: dict[str, Any], constraint: Constraint) -> None:
    asked = constraint_of(parse(json.dumps(fields).encode(), kind))
    assert asked is not None
    assert asked.constraint == constraint
    assert asked.param in fields


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"structured_outputs": {"json": None}}],
    ids=str,
)
def test_values_that_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert constraint_of(parse(json.dumps(fields).encode(), ChatRequest)) is None


NESTED: dict[str, Any] = functools.reduce(lambda inner, _: {"not": inner}, range(MAX_DEPTH), {"type": "object"})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "{}", "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_json": NESTED}, "guided_json"),
        ({"guided_json": json.dumps(NESTED)}, "guided_json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": NESTED}}}, "response_format"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": "a" * (MAX_CONSTRAINT_CHARS + 1)}, "guided_regex"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_cannot_be_read_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        constraint_of(parse(json.dumps(fields).encode(), ChatRequest))
    assert (raised.value.status, raised.value.param) == (400, param)


def test_ignore_eos_keeps_a_constrained_text_going_as_long_as_it_may() -> None:
    facts = fake_model.facts()
    request = ChatRequest(guided_regex="a+", ignore_eos=True, logit_bias={"7": 1.0, "1022": 5.0})
    submit = settings_of(request, facts, 1).submit("r", [1], 0, facts)
    ids, values = tokens.unpack(submit.sampling.bias_ids), tokens.unpack_floats(submit.sampling.bias_values)
    bias = dict(zip(ids, values, strict=True))
    assert not submit.ignore_eos
    assert bias == {7: 1.0, **dict.fromkeys(facts.eos_token_ids, NEVER)}
    assert settings_of(ChatRequest(ignore_eos=True), facts, 1).submit("r", [1], 0, facts).ignore_eos
