"""The issue's picture: a prompt of 8,000 tokens among running streams and short prompts, at a budget of 512 rows."""

import pytest

from services.scheduler.core.limits import Settings
from shared.wire.executor import work_of
from shared.wire.facts import ExecutorLimits, ModelFacts
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")
BUDGET = 512
LONG = 8000
SOLO_STEPS = -(-LONG // BUDGET)


class Scene:
    """Four streams decode; the long prompt has just come."""

    def __init__(self, max_inflight):
        self.world = World(Settings(max_inflight=max_inflight, step_time_budget_ms=10**9), FACTS)
        self.gateway = self.world.join_gateway()
        self.executor = self.world.join_executor(ExecutorLimits(1200, 16, 32, BUDGET))
        self.number = 0
        self.streams = [self.submit(10, 2000) for _ in range(4)]
        while not all(stream.tokens for stream in self.streams):
            self.step()
        self.step()
        self.long = self.submit(LONG, 4)

    def submit(self, num_prompt, max_tokens):
        self.number += 1
        prompt = [(61 * self.number + i * self.number) % 1000 for i in range(num_prompt)]
        return self.world.submit(self.gateway, prompt, max_tokens)

    def step(self):
        """Run one step; every decoding stream must be in it."""
        plan = self.executor.plans[0]
        assert sum(row.num_tokens for row in work_of(plan)) <= BUDGET
        before = [len(stream.tokens) for stream in self.streams if stream.tokens]
        self.world.run_step(self.executor.id)
        after = [len(stream.tokens) for stream in self.streams if stream.tokens]
        if before and all(before):
            assert after[: len(before)] == [count + 1 for count in before], "a stream missed a step"

    def steps_until(self, done):
        steps = 0
        while not done():
            self.step()
            steps += 1
        return steps


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_short_prompts_pass_a_prompt_of_8000_tokens_that_no_stream_notices(max_inflight):
    scene = Scene(max_inflight)
    scene.step()
    shorts = [scene.submit(40 + 10 * i, 8) for i in range(5)]
    firsts = {}
    for step in range(1, 4):
        scene.step()
        firsts |= {i: step for i, short in enumerate(shorts) if short.tokens and i not in firsts}
    assert sorted(firsts) == [0, 1, 2, 3, 4], "each has its first token within 3 steps of its arrival"
    steps = 1 + 3 + scene.steps_until(lambda: scene.long.tokens)
    assert steps <= SOLO_STEPS + max_inflight + 2, "the shorts took about one step's worth from it"


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_a_prompt_of_8000_tokens_keeps_a_quarter_while_short_ones_never_stop_coming(max_inflight):
    scene = Scene(max_inflight)
    steps = 0
    while not scene.long.tokens:
        while len(scene.world.streams[scene.gateway]) < 30:
            scene.submit(100, 1)
        scene.step()
        steps += 1
    assert steps <= SOLO_STEPS * BUDGET / ((BUDGET - 4) // 4 - 16) + max_inflight + 1
