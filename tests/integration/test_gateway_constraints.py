"""A constraint is tried out before anything is submitted: bad ones are refused, hostile ones cost a bounded time."""

import asyncio
import json
import os
from typing import Any

import pytest

from services.gateway import helper_process
from shared.wire.sampling import Constraint
from tests.fakes.gateway_world import World, error_of, world
from tests.fakes.scripted_scheduler import ScriptedScheduler
from tests.fakes.waiting import await_until


def a_schema(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def children(w: World) -> list[int]:
    """Process ids of the helpers that try constraints out."""
    processes = [helper._process for helper in w.gateway.constraints._processes.values()]
    return [process.pid for process in processes if process is not None and process.returncode is None]


async def test_a_constraint_reaches_the_scheduler() -> None:
    async with world(ScriptedScheduler()) as w:
        assert (await w.chat(**a_schema(type="integer"), max_tokens=2)).status_code == 200
        assert (await w.complete(guided_regex="a+", max_tokens=2, n=2)).status_code == 200
        sent = [submit.sampling.constraint for submit in w.scheduler.submits]
        assert sent == [Constraint("json_schema", '{"type":"integer"}'), *[Constraint("regex", "a+")] * 2]


async def test_a_grammar_in_ebnf_reaches_the_scheduler_in_lark() -> None:
    grammar = 'root ::= answer "."\nanswer ::= "yes" | "no" # or no other'
    async with world(ScriptedScheduler()) as w:
        for fields in ({"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}, "ignore_eos": True}):
            for send in (w.chat, w.complete):
                assert (await send(**fields, max_tokens=2)).status_code == 200
                submit = w.scheduler.submits[-1]
                assert submit.sampling.constraint == Constraint("lark", 'start: ANSWER "."\nANSWER: "yes"\n     | "no"')
                assert not submit.ignore_eos


BAD: list[tuple[dict[str, Any], str]] = [
    (a_schema(type="strin"), "strin"),
    (a_schema(type="string", minLength=5, maxLength=2), "minLength"),
    (a_schema(**{"$ref": "#/$defs/nothing"}), "nothing"),
    (a_schema(**{"$ref": "https://example.com/schema"}), "example.com"),
    (a_schema(type="array", uniqueItems=True), "uniqueItems"),
    (a_schema(**{"not": {"type": "string"}}), "not"),
    ({"structured_outputs": {"regex": "(a"}}, "unclosed"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "look"),
    ({"guided_regex": r"(a)\1"}, "backreferences"),
    ({"guided_grammar": "start: nothing"}, "nothing"),
    ({"guided_grammar": "start: <|nothing|>"}, "special token"),
    ({"guided_grammar": ""}, ""),
    ({"guided_grammar": 'root ::= ("a"'}, "Expected ')'"),
    ({"guided_grammar": "root ::= " + "(" * 9999}, "nested too deeply"),
    ({"structured_outputs": {"grammar": 'root ::= _a\n_a ::= "a" _a'}}, "structured_outputs"),
    ({"guided_grammar": r"start: /[^\s\S]/"}, "no text"),
    ({"guided_grammar": "root ::= [^a]* [^b]* [^c]* [^a]* [^b]* [^a]*"}, "too complex"),
]

DEEP: dict[str, Any] = {"type": "string"}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"a": DEEP}}

WIDE = {f"property {i}": {"type": "string"} for i in range(1500)}

HOSTILE: list[dict[str, Any]] = [
    a_schema(**DEEP),
    a_schema(type="object", properties=WIDE),
    a_schema(**{"$ref": "#"}),
    a_schema(**{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    a_schema(allOf=[{"type": "string", "pattern": f".*{'ab' * i}.*"} for i in range(1, 20)]),
    a_schema(type="integer", multipleOf=1000003),
]
"""The last two would compile for half a minute and more."""


async def test_what_no_executor_could_follow_is_refused_with_the_field_and_the_reason() -> None:
    async with world(ScriptedScheduler()) as w:
        for fields, why in BAD:
            for send in (w.chat, w.complete):
                error = error_of(await send(**fields, stream=True), next(iter(fields)))
                assert why in error["message"], error
                assert len(error["message"]) < 1000
        assert not w.scheduler.submits


async def test_hostile_constraints_are_refused_in_bounded_time_and_nobody_waits_for_them() -> None:
    async with world(ScriptedScheduler()) as w:
        assert (await w.complete(guided_regex="a", max_tokens=1)).status_code == 200
        trying = [asyncio.create_task(w.complete(**fields)) for fields in HOSTILE]
        while not all(task.done() for task in trying):
            assert (await w.complete(max_tokens=1)).status_code == 200
            assert (await w.complete(max_tokens=1, guided_regex="a")).status_code == 200, "known, so not tried again"
        for task in trying:
            error_of(await task, "response_format")
        os.kill(children(w)[0], 9)
        await await_until(lambda: not children(w), 20, "nobody can try anything out")
        for fields in HOSTILE:
            error_of(await w.complete(**fields), "response_format")
        assert not children(w), "the verdicts are kept"


async def test_a_hostile_grammar_in_ebnf_is_refused_in_bounded_time() -> None:
    """It would take a minute to see that all of its rules are patterns."""
    chain = "".join(f"r{i} ::= r{i + 1}\n" for i in range(9999)) + 'r9999 ::= "a"\nroot ::= r0'
    async with world(ScriptedScheduler()) as w:
        assert "processor time" in error_of(await w.complete(guided_grammar=chain), "guided_grammar")["message"]


async def test_a_long_constraint_for_very_many_choices_is_refused() -> None:
    async with world(ScriptedScheduler()) as w:
        long = {"enum": ["x" * 200_000]}
        asked = {"guided_json": long, "max_tokens": 1}
        assert (await w.complete(**asked, n=2)).status_code == 200
        error_of(await w.complete(**asked, n=100), "guided_json")
        assert len(w.scheduler.submits) == 2


async def test_schemas_of_every_day_are_not_too_much() -> None:
    properties = {f"property_{i}": {"type": ["string", "null"], "maxLength": 40} for i in range(100)}
    kinds = [
        {"type": "object", "properties": {"kind": {"const": f"k{i}"}, "n": {"type": "integer"}}, "required": ["kind"]}
        for i in range(50)
    ]
    tree = {"type": "object", "properties": {"v": {}, "children": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    async with world(ScriptedScheduler()) as w:
        for schema in (
            {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False},
            {"type": "object", "properties": dict(list(WIDE.items())[:500])},
            {"anyOf": kinds},
            {"oneOf": kinds},
            {"enum": [f"value number {i}" for i in range(2000)]},
            {"$defs": {"t": tree}, "$ref": "#/$defs/t"},
        ):
            response = await w.chat(**a_schema(**schema), max_tokens=1)
            assert response.status_code == 200, response.text


async def test_a_process_that_dies_is_started_again_and_one_that_is_closed_is_gone() -> None:
    async with world(ScriptedScheduler()) as w:
        assert not children(w), "nobody has asked for it"
        assert (await w.complete(guided_regex="a", max_tokens=1)).status_code == 200
        [first] = children(w)
        os.kill(first, 9)
        await await_until(lambda: not children(w), 20, "its death is seen")
        assert (await w.complete(guided_regex="b", max_tokens=1)).status_code == 200
        [second] = children(w)
        assert second != first
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


async def test_more_new_constraints_than_can_be_tried_out_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "MAX_WAITING", 2)
    async with world(ScriptedScheduler()) as w:
        asked = [asyncio.create_task(w.complete(guided_regex=f"a{i}", max_tokens=1)) for i in range(12)]
        statuses = [(await task).status_code for task in asked]
        assert set(statuses) == {200, 429}
        assert (await w.complete(guided_regex="a0", max_tokens=1)).status_code == 200


async def test_an_overdue_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(ScriptedScheduler()) as w:
        monkeypatch.setattr(helper_process, "OVERDUE_S", 0.0)
        response = await w.complete(guided_regex="a", max_tokens=1)
        assert response.status_code == 503
        assert "constraint" in json.loads(response.text)["error"]["message"]
        monkeypatch.setattr(helper_process, "OVERDUE_S", 60.0)
        assert (await w.complete(guided_regex="a", max_tokens=1)).status_code == 200
