"""Constrained streams through whole systems: they fit, and go on with the same text whatever dies under them."""

import asyncio
import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.prompts import Prompt
from tests.e2e.streams import Said, stream, together
from tests.e2e.system import Role, System
from tests.fakes.waiting import await_until

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "n", "ok"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 5, "maxItems": 5}
PATTERN = r"([a-z]{3,9} ){12}[0-9]{4}"
ASKED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA}}},
    {"structured_outputs": {"regex": PATTERN}},
    {"structured_outputs": {"choice": ["yes and " * 20 + "yes", "no and " * 20 + "no"]}},
    {},
]


def options(number: int, **more: Any) -> dict[str, Any]:
    extra = {**ASKED[number % len(ASKED)], "min_tokens": 3}
    return {"seed": number, "temperature": 0.9, "max_tokens": 400, "extra_body": extra, **more}


def a_prompt(number: int) -> Prompt:
    return Prompt(f"stream number {number} " + "and so on " * number, chat=bool(number % 2))


def fits(said: Said, number: int) -> bool:
    """Whether the text is whole and what was asked for; raises where it claims to be and is not."""
    if said.finish_reason != "stop":
        return False
    match ASKED[number % len(ASKED)]:
        case {"response_format": _}:
            jsonschema.validate(json.loads(said.text), SCHEMA)
        case {"structured_outputs": {"regex": pattern}}:
            assert re.fullmatch(pattern, said.text)
        case {"structured_outputs": {"choice": choices}}:
            assert said.text in choices
        case _:
            return False
    return True


async def a_crowd(client: openai.AsyncOpenAI, size: int) -> list[Said]:
    return await together(*(stream(client, a_prompt(n), **options(n)) for n in range(size)))


def same(said: list[Said], calm: list[Said]) -> None:
    for each, expected in zip(said, calm, strict=True):
        assert each.token_ids == expected.token_ids
        assert (each.text, each.finish_reason) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize(("executors", "killed"), [(2, ["executor"]), (1, ["scheduler", "executor"])], ids=str)
async def test_constrained_streams_outlive_executor_and_scheduler(
    start_system: StartSystem, executors: int, killed: list[Role]
) -> None:
    system = start_system(executors=executors, faults={"step_ms": 10})
    async with system.async_client(timeout=60) as client:
        calm = await a_crowd(client, 8)
        assert sum(fits(each, number) for number, each in enumerate(calm)) == 6
        said = [Said() for _ in calm]
        tasks = [asyncio.create_task(stream(client, a_prompt(n), said[n], **options(n))) for n in range(8)]
        await await_until(lambda: all(len(each.token_ids) >= 6 for each in said), 60, "all streams are under way")
        for role in killed:
            system.kill(role)
        await asyncio.gather(*tasks)
        same(said, calm)
    system.wait_idle()


async def test_constrained_streams_that_are_preempted_say_the_same(start_system: StartSystem) -> None:
    small = start_system(num_blocks=40, max_lanes=8, max_model_len=500)
    large = start_system()
    async with small.async_client(timeout=60) as crowded, large.async_client(timeout=60) as calm:
        same(await a_crowd(crowded, 8), await a_crowd(calm, 8))
    assert small.debug_state()["scheduler"]["preempted"] > 0


def test_together_with_other_fields(fake_system: System) -> None:
    with fake_system.client() as client:

        def ask(regex: str, **fields: Any) -> Any:
            extra = {"structured_outputs": {"regex": regex}, **fields.pop("extra_body", {})}
            return client.completions.create(model="default", prompt="a", extra_body=extra, **fields)

        stopped = ask("[a-z]{4} END [a-z]{9}", stop=["END"], max_tokens=50).choices[0]
        assert (re.fullmatch("[a-z]{4} ", stopped.text) is not None, stopped.finish_reason) == (True, "stop")
        several = ask("[a-z]{20}[.]", n=4, max_tokens=50, seed=3, frequency_penalty=1.0, logprobs=2).choices
        assert all(re.fullmatch("[a-z]{20}[.]", choice.text) for choice in several)
        assert len({choice.text for choice in several}) > 1
        assert all(choice.finish_reason == "stop" for choice in several)
        assert ask("a{1,50}", max_tokens=60, extra_body={"min_tokens": 20}).usage.completion_tokens > 20
        longest = ask("[bc]{2,40}", max_tokens=60, extra_body={"ignore_eos": True}).choices[0]
        assert (len(longest.text), longest.finish_reason) == (40, "stop")
        cut = ask("[a-z]{50}", max_tokens=5).choices[0]
        assert (re.fullmatch("[a-z]+", cut.text) is not None, cut.finish_reason) == (True, "length")
        with pytest.raises(openai.InternalServerError, match="no token is left"):
            ask("[ab]c", max_tokens=9, extra_body={"min_tokens": 5, "stop_token_ids": [ord("a"), ord("b")]})
        assert ask("[ab]c", max_tokens=9).choices[0].text in ("ac", "bc")


class Place(pydantic.BaseModel):
    """What the real model is asked for."""

    city: str = pydantic.Field(max_length=30)
    country: Literal["France", "Spain", "Italy"]
    population: int = pydantic.Field(ge=0, le=100_000_000)


def test_every_way_in_which_the_official_client_parses(fake_system: System) -> None:
    messages: Any = [{"role": "user", "content": "Where?"}]
    with fake_system.client() as client:
        with client.chat.completions.stream(model="default", messages=messages, response_format=Place) as events:
            for _ in events:
                pass
            assert isinstance(events.get_final_completion().choices[0].message.parsed, Place)
        response = client.responses.parse(model="default", input="Where?", text_format=Place)
        assert isinstance(response.output_parsed, Place)


def parse_place(system: System, temperature: float, seed: int) -> Place | None:
    with system.client(timeout=120) as client:
        completion = client.chat.completions.parse(
            model="default",
            messages=[{"role": "user", "content": "Where is the Eiffel Tower?"}],
            response_format=Place,
            temperature=temperature,
            seed=seed,
            max_tokens=120,
        )
        assert completion.choices[0].finish_reason == "stop"
        return completion.choices[0].message.parsed


@pytest.mark.model
def test_the_official_client_parses_what_the_real_model_says(start_system: StartSystem) -> None:
    system = start_system(backend="torch", dtype="float32")
    for temperature, seed in ((0.0, 0), (1.5, 1), (1.5, 2)):
        assert isinstance(parse_place(system, temperature, seed), Place)
    with system.client(timeout=120) as client:
        told = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Is the Earth flat?"}],
            logprobs=True,
            top_logprobs=2,
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 10, "ignore_eos": True},
        )
        choice = told.choices[0]
        assert (choice.message.content in ("yes", "no"), choice.finish_reason) == (True, "stop")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert choice.logprobs.content[0].logprob < choice.logprobs.content[0].top_logprobs[0].logprob, "of all tokens"
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="default", prompt="a", extra_body={"guided_grammar": "start: nothing"})
        assert refused.value.param == "guided_grammar"
