"""Logprobs, echo and penalties through the whole system: the same alone, in a crowd, preempted, and across a kill."""

import asyncio
import json
import signal
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.system import Role, System
from tests.fakes.waiting import await_until

PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3}
TEXT = "The river rises in the mountains and runs west before it meets the sea, and every morning the baker "


def requests(max_tokens: int) -> list[dict[str, Any]]:
    """Bodies for /v1/completions, greedy and seeded; prompts differ from the first token on."""
    kinds: list[dict[str, Any]] = [
        {"logprobs": 3, **PENALTIES},
        {"logprobs": 2, "echo": True, "temperature": 0.8, "seed": 7, **PENALTIES},
        {"logprobs": 0, "temperature": 0.8, "seed": 11, "n": 2, "logit_bias": {"260": 3, "261": -100}},
        {"temperature": 0, "frequency_penalty": 1.0},
    ]
    common = {"max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, "temperature": 0, "seed": 5}
    return [{**common, "prompt": f"{i} {TEXT}", **kind} for i, kind in enumerate(kinds)]


async def answers(client: openai.AsyncOpenAI, bodies: list[dict[str, Any]]) -> list[Any]:
    """The choices of each, all at once, by strict JSON."""

    async def one(body: dict[str, Any]) -> Any:
        response = await client.post("/completions", cast_to=httpx.Response, body=body)
        return json.loads(response.text, parse_constant=pytest.fail)["choices"]

    return await asyncio.gather(*map(one, bodies))


def client_of(system: System) -> openai.AsyncOpenAI:
    """Tries again when told to: a request that no scheduler has accepted yet gets a 503 when it dies."""
    return system.async_client(timeout=120, max_retries=10)


async def check(system: System, max_tokens: int, copies: int, killed: list[Role]) -> None:
    bodies = requests(max_tokens)
    async with client_of(system) as client:
        alone = [(await answers(client, [body]))[0] for body in bodies]
        told = alone[1][0]["logprobs"]
        assert told["token_logprobs"][0] is None
        assert all(-9999 <= logprob <= 0 for logprob in told["token_logprobs"][1:])
        assert len(told["tokens"]) == len(told["text_offset"])
        assert alone[2][0]["token_ids"] != alone[2][1]["token_ids"], "choices of one request differ"
        before = system.debug_state()["scheduler"]["preempted"]
        assert await answers(client, bodies * copies) == alone * copies
        assert system.debug_state()["scheduler"]["preempted"] > before, "nothing was preempted"
        for role in killed:
            crowd = asyncio.create_task(answers(client, bodies * copies))
            await await_until(lambda: system.debug_state()["scheduler"]["running"] > 2, 60, "requests run")
            system.kill(role, signal.SIGKILL)
            assert await crowd == alone * copies, f"after the {role} was killed"
    system.wait_ready()


async def test_sched_28_fake_model(start_system: StartSystem) -> None:
    system = start_system(executors=2, num_blocks=40, faults={"step_ms": 5})
    await check(system, 80, 3, ["executor", "scheduler"])


@pytest.mark.model
async def test_sched_28_default_model(start_system: StartSystem) -> None:
    system = start_system(backend="torch", dtype="float32", executors=2, num_blocks=12)
    await check(system, 28, 2, ["executor"])


@pytest.mark.model
async def test_exec_37_prompt_logprobs_of_a_long_prompt(real_system: System) -> None:
    """Chunk by chunk, whatever else runs; a sum over the prompt is its likelihood."""
    body = {"prompt": TEXT * 60, "echo": True, "logprobs": 5, "max_tokens": 1, "temperature": 0}
    async with client_of(real_system) as client:
        first, second, (short,) = await answers(client, [body, body, {**body, "prompt": TEXT}])
        assert first == second
        told, told_of_short = first[0]["logprobs"], short["logprobs"]
        assert len(told["tokens"]) > 1100
        assert "".join(told["tokens"]) == first[0]["text"]
        length = len(told_of_short["tokens"]) - 3  # up to where the two texts, or the cuts of their words, differ
        assert told["token_logprobs"][:length] == told_of_short["token_logprobs"][:length]
        assert all(value < 0 for value in told["token_logprobs"][1:])
