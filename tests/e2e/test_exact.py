"""The real model gives the very tokens that transformers gives, however its requests are cut, mixed and preempted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.prompts import PROMPTS
from tests.e2e.streams import Said, stream, together
from tests.e2e.system import ROOT, System

pytestmark = pytest.mark.model
MAX_TOKENS = 24


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Each prompt's greedy tokens, alone, by transformers' own ``generate`` in float32 (in a process of its own)."""
    path = tmp_path_factory.mktemp("reference") / "tokens.json"
    command = [sys.executable, "-m", "tests.e2e.reference", str(MAX_TOKENS), str(path)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=500, env=dict(os.environ, PYTHONWARNINGS="ignore"))
    tokens: list[list[int]] = json.loads(Path(path).read_text())
    return tokens


async def _all_at_once(system: System, num_ballast: int = 0) -> list[Said]:
    """What each prompt said. Streams of ballast start first, all short, and outgrow small pools together."""
    grow = {"temperature": 1.0, "max_tokens": 80, "extra_body": {"ignore_eos": True}}
    async with system.async_client(timeout=300) as client:
        ballast = [stream(client, PROMPTS[number % 8], seed=number, **grow) for number in range(num_ballast)]
        streams = [stream(client, prompt, temperature=0, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
        return (await together(*ballast, *streams, stagger_s=0.02))[num_ballast:]


def preemptions(system: System) -> int:
    state = system.debug_state()["scheduler"]
    count: int = state["preempted"]
    return count


@pytest.mark.parametrize(
    ("executors", "max_step_tokens", "num_blocks"),
    [(1, 512, 400), (1, 96, 66), (2, 160, 66)],
    ids=["one step fits most", "small chunks, tiny pool", "two executors, tiny pools"],
)
async def test_every_greedy_output_equals_transformers(
    start_system: StartSystem, expected: list[list[int]], executors: int, max_step_tokens: int, num_blocks: int
) -> None:
    system = start_system(
        backend="torch",
        dtype="float32",
        executors=executors,
        max_step_tokens=max_step_tokens,
        num_blocks=num_blocks,
    )
    said = await _all_at_once(system, num_ballast=24 if num_blocks < 100 else 0)
    for prompt, tokens, got in zip(PROMPTS, expected, said, strict=True):
        assert got.token_ids == tokens, f"{prompt.text[:40]!r} of {got.prompt_tokens} tokens: {got.text!r}"
        assert got.completion_tokens == len(tokens)
    if num_blocks < 100:
        assert preemptions(system) > 0, "the pool was meant to be too small"
    else:
        again = await _all_at_once(system)
        assert [got.token_ids for got in again] == expected, "prompts from the prefix cache"
        assert system.debug_state()["scheduler"]["executors"][0]["blocks"]["cached"] > 0
    system.wait_idle()
