"""Executors come and go while streams run, and what one request computed another need not compute again."""

import asyncio
import signal

import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.prompts import Prompt
from tests.e2e.streams import Said, stream
from tests.fakes.waiting import await_until

NUM_STREAMS = 8
LONG = {"max_tokens": 150, "temperature": 0.8, "extra_body": {"ignore_eos": True}}
SLOW = {"step_ms": 10}


@pytest.mark.parametrize("executors", [1, 2])
async def test_an_executor_told_to_stop_leaves_and_streams_do_not_notice(
    start_system: StartSystem, executors: int
) -> None:
    """SIGTERM in the middle of streams; ``up`` then starts another one. Whatever is not through in time moves."""
    system = start_system(executors=executors, faults=SLOW)
    prompts = [Prompt(f"stream number {n} " + "and so on " * n, chat=bool(n % 2)) for n in range(NUM_STREAMS)]
    async with system.async_client(timeout=60) as client:
        calm = await asyncio.gather(*(stream(client, prompt, seed=n, **LONG) for n, prompt in enumerate(prompts)))
        said = [Said() for _ in prompts]
        tasks = [
            asyncio.create_task(stream(client, prompt, said[n], seed=n, **LONG)) for n, prompt in enumerate(prompts)
        ]
        await await_until(lambda: all(len(each.token_ids) >= 10 for each in said), 60, "all streams are under way")
        system.kill("executor", signal.SIGTERM)
        await asyncio.gather(*tasks)
        for each, expected in zip(said, calm, strict=True):
            assert (each.token_ids, each.text, each.finish_reason) == (expected.token_ids, expected.text, "length")
            assert (each.prompt_tokens, each.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)
    system.wait_ready()
    system.wait_idle()


async def test_the_second_of_two_equal_prompts_comes_from_the_cache(start_system: StartSystem) -> None:
    system = start_system()
    fields = {"model": "default", "prompt": "the same words again " * 20, "max_tokens": 8, "seed": 7}
    async with system.async_client(timeout=60) as client:
        first, second = [await client.completions.create(**fields) for _ in range(2)]
        salted = await client.completions.create(**fields, extra_body={"cache_salt": "pepper"})
        several = await client.completions.create(**{**fields, "prompt": "other words " * 20}, n=3)
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second, salted, several)]
    size = first.usage.prompt_tokens
    assert cached == [0, (size - 1) // 16 * 16, 0, 0]
    assert first.choices[0].text == second.choices[0].text == salted.choices[0].text
    blocks = system.debug_state()["scheduler"]["executors"][0]["blocks"]
    assert blocks["cached"] > 0
    assert blocks["used"] == 0
    system.wait_idle()


async def test_cached_tokens_are_told_when_a_stop_string_ends_the_text(start_system: StartSystem) -> None:
    system = start_system()
    fields = {"model": "default", "prompt": "the same words again " * 20, "seed": 7}
    async with system.async_client(timeout=60) as client:
        first = await client.completions.create(**fields, max_tokens=12)
        second = await client.completions.create(**fields, max_tokens=12, stop=first.choices[0].text[6:10])
    assert second.choices[0].finish_reason == "stop"
    assert second.usage.prompt_tokens_details.cached_tokens == (second.usage.prompt_tokens - 1) // 16 * 16


async def test_without_the_prefix_cache_nothing_is_cached(start_system: StartSystem) -> None:
    system = start_system(prefix_cache="off")
    fields = {"model": "default", "prompt": "the same words again " * 20, "max_tokens": 8, "seed": 7}
    async with system.async_client(timeout=60) as client:
        answers = [await client.completions.create(**fields) for _ in range(2)]
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, 0]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert system.debug_state()["scheduler"]["executors"][0]["blocks"]["cached"] == 0
