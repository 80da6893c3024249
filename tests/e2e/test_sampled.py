"""A seeded sample is the same alone, in a crowd, after preemption, and across the death of the executor it runs on."""

import asyncio
import signal

import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.prompts import PROMPTS, Prompt
from tests.e2e.streams import Said, stream, together
from tests.fakes.waiting import await_until

pytestmark = pytest.mark.model
PROMPT = Prompt("Write a short story about a lighthouse.", chat=True)
SAMPLED = {"temperature": 0.8, "seed": 1234, "max_tokens": 48, "extra_body": {"ignore_eos": True}}


async def test_sample_18_same_tokens_alone_in_a_crowd_preempted_and_across_a_kill(start_system: StartSystem) -> None:
    system = start_system(backend="torch", dtype="float32", executors=2, num_blocks=72)
    async with system.async_client(timeout=120) as client:
        alone = await stream(client, PROMPT, **SAMPLED)
        assert len(alone.token_ids) == 48

        # Twenty-four short prompts that are all admitted and then outgrow the pools together.
        grow = {"temperature": 1.0, "max_tokens": 80, "extra_body": {"ignore_eos": True}}
        crowd = [stream(client, prompt, **grow) for prompt in PROMPTS[:12] * 2]
        before = system.debug_state()["scheduler"]["preempted"]
        in_crowd = (await together(*crowd, stream(client, PROMPT, **SAMPLED), stream(client, PROMPT, **SAMPLED)))[-2:]
        assert [said.token_ids for said in in_crowd] == [alone.token_ids] * 2
        assert system.debug_state()["scheduler"]["preempted"] > before

        said = Said()
        task = asyncio.create_task(stream(client, PROMPT, said, **SAMPLED))
        await await_until(lambda: len(said.token_ids) >= 8, 60, "the stream is under way")
        carrier = next(e for e in system.debug_state()["scheduler"]["executors"] if e["lanes"]["used"])
        system.kill("executor", signal.SIGKILL, index=system.pids("executor").index(carrier["pid"]))
        await task
        assert said.token_ids == alone.token_ids
        assert said.text == alone.text
        assert said.completion_tokens == 48
