"""The whole system on a CUDA device says what it says on a CPU; run by ``make gpu-check``."""

import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.prompts import PROMPTS
from tests.e2e.streams import Said, stream, together
from tests.e2e.system import System
from tests.e2e.test_constrained import a_crowd, fits

pytestmark = [pytest.mark.cuda, pytest.mark.model]


async def said_by(system: System) -> list[Said]:
    async with system.async_client(timeout=300) as client:
        return await together(*[stream(client, prompt, temperature=0, max_tokens=16) for prompt in PROMPTS])


async def test_the_greedy_tokens_are_those_of_the_cpu(start_system: StartSystem) -> None:
    cpu = start_system(backend="torch", device="cpu", dtype="float32")
    expected = [said.token_ids for said in await said_by(cpu)]
    cpu.stop()
    cuda = start_system(backend="torch", device="cuda", dtype="float32", num_blocks=1024)
    assert [said.token_ids for said in await said_by(cuda)] == expected


async def test_steps_launched_ahead_say_the_same(start_system: StartSystem) -> None:
    said = []
    for max_inflight in (1, 2):
        cuda = start_system(backend="torch", device="cuda", num_blocks=1024, max_inflight=max_inflight)
        said.append([each.token_ids for each in await said_by(cuda)])
        cuda.stop()
    assert said[0] == said[1]


async def test_constrained_streams_fit(start_system: StartSystem) -> None:
    cuda = start_system(backend="torch", device="cuda", num_blocks=1024)
    async with cuda.async_client(timeout=300) as client:
        said = await a_crowd(client, 8)
    assert sum(fits(each, number) for number, each in enumerate(said)) >= 4, "a long text may be cut"
