"""Any schema's output validates, whatever the model would rather say, and whatever else is asked for."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from services.executor import constraints, sampling
from services.executor.batch import SampleRow
from services.executor.constraints import Constraints
from shared import fake_model
from shared.constraints import read_vocabulary
from shared.wire import tokens
from shared.wire.sampling import Constraint, Sampling

FACTS = fake_model.facts()
ENDS = set(fake_model.EOS_TOKEN_IDS)
MAX_TOKENS = 300
VOCABULARY = read_vocabulary(FACTS, None)
CLOSERS = [*b'"]}', *ENDS]

_names = st.sampled_from(["a", "b", "name", "größe", 'quo"te', "x y"])
_small = st.integers(-50, 50)


def _between(kind: str, least: str, most: str, low: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    return st.builds(lambda a, more: {"type": kind, least: a, most: a + more}, low, st.integers(0, 9))


_leaves = st.one_of(
    _between("integer", "minimum", "maximum", _small),
    _between("string", "minLength", "maxLength", st.integers(0, 3)),
    st.sampled_from([{"type": "string", "pattern": pattern} for pattern in ("^[a-c]{2,5}$", "^é+\\d$", "x.y")]),
    st.sampled_from([{"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {}]),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(_small, _names, st.none()), min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, st.one_of(_small, _names, st.just([1, {"a": None}]))),
)


def _objects(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], required: int, more: bool) -> dict[str, Any]:
        names = list(properties)[:required]
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": more}

    return st.builds(build, st.dictionaries(_names, schemas, max_size=3), st.integers(0, 3), st.booleans())


def _arrays(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(items: Any, least: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}

    return st.builds(build, schemas, st.integers(0, 2), st.integers(0, 2))


def _unions(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda each: {"anyOf": each}, st.lists(schemas, min_size=1, max_size=3))


SCHEMAS = st.recursive(_leaves, lambda inner: st.one_of(_objects(inner), _arrays(inner), _unions(inner)), max_leaves=6)


@pytest.fixture(autouse=True, scope="module")
def _patient() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraints, "PATIENCE_ALONE_S", 60.0)
        yield


def say(asked: Sampling, seed: int) -> tuple[list[int], str]:
    """What a model of random logits says by the real sampling, and why it ends; texts are drawn to a close."""
    held = Constraints(FACTS, lambda: VOCABULARY)
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    while len(output) < MAX_TOKENS:
        ids = np.array([1, *output], np.int32)
        rows = [SampleRow(0, 0, 0, asked, len(ids), ids, num_prompt=1)]
        logits = torch.randn(1, FACTS.vocab_size, generator=generator) * 4
        logits[0, CLOSERS] += 3
        answer = sampling.sample(logits, rows, masks=held.masks(rows)).read()
        assert not answer.failures, (answer.failures, asked, seed)
        output.append(answer.tokens[0])
        if output[-1] in ENDS:
            return output[:-1], "stop"
        if len(output) % 50 == 0:
            held.released(0)  # as after a preemption
    return output, "length"


@given(SCHEMAS, st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 2.0]))
@settings(max_examples=60)
def test_the_output_of_any_schema_validates(schema: Any, seed: int, temperature: float) -> None:
    constraint = Constraint("json_schema", json.dumps(schema))
    output, end = say(Sampling(temperature=temperature, seed=seed, constraint=constraint), seed)
    if end == "stop":
        text = b"".join(map(fake_model.token_bytes, output)).decode()
        jsonschema.validate(json.loads(text), schema)


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=30)
def test_the_output_is_one_of_the_choices(choices: list[str], seed: int) -> None:
    source = "start: " + " | ".join(map(json.dumps, choices))
    held_back = Sampling(temperature=1.0, seed=seed, min_tokens=9, stop_token_ids=tokens.pack(ENDS))
    asked = replace(held_back, constraint=Constraint("lark", source))
    output, end = say(asked, seed)
    assert end == "stop"
    assert b"".join(map(fake_model.token_bytes, output)).decode() in choices
