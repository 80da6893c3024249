"""The scheduler core in tiny worlds: whatever happens, every stream gets exactly what an undisturbed run would bring.

One Hypothesis state machine over ``tests.fakes.scheduler_world``, which checks blocks B1-B3 and B5, plans P1-P6 and
requests R1-R14 (numbers as in docs/scheduling.md) after every event. Each run ends by draining to rest.
"""

import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shared.wire import tokens
from shared.wire.facts import ExecutorLimits
from shared.wire.gateway import TenantLimits
from tests.fakes.core_settings import core_settings
from tests.fakes.scheduler_world import World
from tests.fakes.streams import POISON, VOCAB

MOST_GATEWAYS = 3
MOST_EXECUTORS = 3

index = st.integers(0, 7)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
pools = st.tuples(st.integers(6, 12), st.integers(1, 4))
tight = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 5, 8, 16]))


ASKS = [
    {"num_logprobs": 0},
    {"num_logprobs": 2, "frequency_penalty": 0.4},
    {"num_logprobs": 1, "prompt_logprobs": True},
    {"repetition_penalty": 1.5},
]
"""What some requests ask for besides tokens."""


LIMITS = [TenantLimits(2.0, 6, 90, 3), TenantLimits(None, 0, 200, 3), TenantLimits(concurrency=3)]
"""Of the one tenant that has any; as gateways with different files would tell them."""


class SchedulerMachine(RuleBasedStateMachine):
    """Everything that can happen to a scheduler, in any order."""

    world: World | None = None

    @initialize(chosen=core_settings, pool=pools, same_pools=st.booleans(), lanes=tight, overlaps=st.booleans())
    def begin(self, chosen, pool, same_pools, lanes, overlaps):
        self.pool = pool
        self.same_pools = same_pools
        self.world = World(chosen, pool_slots=pool[0] * pool[1] if same_pools else None, overlaps=overlaps)
        self.world.join_gateway()
        self._join(pool, lanes)

    def _join(self, pool, lanes, numerics="a"):
        num_blocks, block_size = self.pool if self.same_pools else pool
        self.world.join_executor(ExecutorLimits(num_blocks, block_size, *lanes), numerics)

    def _gateway(self, which):
        return list(self.world.streams)[which % len(self.world.streams)]

    def _executor(self, which):
        return list(self.world.executors)[which % len(self.world.executors)]

    def has_executor(self):
        return self.world is not None and bool(self.world.executors)

    @rule(
        gateway=index,
        prompt=prompts,
        max_tokens=st.integers(1, 12),
        seed=st.sampled_from([0, 1, 2, 3, 3, 2, 1, 0, *POISON]),
        stop_token_ids=st.sampled_from([b"", b"", tokens.pack([0])]),
        ignore_eos=st.booleans(),
        min_tokens=st.sampled_from([0, 0, 2]),
        asks=st.sampled_from([{}, {}, {}, *ASKS]),
        priority=st.sampled_from([0, 0, 1, -1]),
        tenant=st.sampled_from(["", "", "", "other", "limited"]),
        deadline_ms=st.sampled_from([0, 0, 0, 0, 200]),
        salt=st.sampled_from(["", "", "", "salt"]),
        limits=st.sampled_from(LIMITS),
        choices=st.sampled_from([1, 1, 1, 1, 2, 3]),
    )
    def submit(self, gateway, prompt, max_tokens, asks, choices, seed, limits, **fields):
        if fields["tenant"] == "limited":
            fields["limits"] = limits
        group = f"group {self.world.numbers}" if choices > 1 else ""
        for choice in range(choices):
            self.world.submit(
                self._gateway(gateway), prompt, max_tokens, seed=seed + choice, group=group, **asks, **fields
            )

    @rule(gateway=index, which=index)
    def submit_again(self, gateway, which):
        """A live id once more: ignored, for a rejection would be read as the live request's end."""
        name = self._gateway(gateway)
        ids = list(self.world.streams[name])
        if ids:
            self.world.submit(name, [0], 1, request_id=ids[which % len(ids)])

    @rule(gateway=index, which=index)
    def cancel(self, gateway, which):
        name = self._gateway(gateway)
        ids = [*self.world.streams[name], "unknown"]
        for _ in range(2):
            self.world.cancel(name, ids[which % len(ids)])

    @precondition(has_executor)
    @rule(which=index, steps=st.integers(1, 4))
    def run_steps(self, which, steps):
        executor = self._executor(which)
        for _ in range(steps):
            if executor in self.world.executors:
                self.world.run_step(executor)

    @precondition(has_executor)
    @rule(which=index, blame_row=st.sampled_from([None, None, 0, 1, 2]), fatal=st.sampled_from([False, False, True]))
    def fail_next_step(self, which, blame_row, fatal):
        self.world.fail_next_step(self._executor(which), blame_row, fatal)

    @precondition(has_executor)
    @rule(which=index, row=st.integers(0, 3))
    def spoil_next_sample(self, which, row):
        self.world.spoil_next_sample(self._executor(which), row)

    @precondition(has_executor)
    @rule(which=index, row=st.integers(0, 3))
    def delay_next_sample(self, which, row):
        self.world.executors[self._executor(which)].backend.delay = row

    @precondition(lambda self: self.world is not None and len(self.world.executors) < MOST_EXECUTORS)
    @rule(pool=pools, lanes=tight, numerics=st.sampled_from("ab"))
    def join_executor(self, pool, lanes, numerics):
        self._join(pool, lanes, numerics)

    @precondition(has_executor)
    @rule(which=index)
    def kill_executor(self, which):
        self.world.kill_executor(self._executor(which))

    @precondition(has_executor)
    @rule(which=index)
    def say_hello_again(self, which):
        self.world.say_hello_again(self._executor(which))

    @precondition(has_executor)
    @rule(which=index, within_ms=st.sampled_from([0, 30, 400]))
    def drain_executor(self, which, within_ms):
        self.world.drain_executor(self._executor(which), within_ms)

    @precondition(has_executor)
    @rule(which=index)
    def hang_executor(self, which):
        self.world.executors[self._executor(which)].hangs = True

    @precondition(has_executor)
    @rule(which=index, token=st.integers(0, 3))
    def lie(self, which, token):
        self.world.lie(self._executor(which), token)

    @precondition(has_executor)
    @rule(which=index, step_behind=st.integers(0, 3), epoch_behind=st.integers(0, 1))
    def tell_old_news(self, which, step_behind, epoch_behind):
        self.world.tell_old_news(self._executor(which), step_behind, epoch_behind)

    @precondition(lambda self: self.world is not None and len(self.world.streams) < MOST_GATEWAYS)
    @rule()
    def join_gateway(self):
        self.world.join_gateway()

    @precondition(lambda self: self.world is not None and len(self.world.streams) > 1)
    @rule(which=index)
    def leave_gateway(self, which):
        self.world.leave_gateway(self._gateway(which))

    @rule(executors_first=st.booleans())
    def restart_scheduler(self, executors_first):
        self.world.restart_scheduler(executors_first)

    @rule(ms=st.sampled_from([1, 50, 250, 600]))
    def pass_time(self, ms):
        self.world.pass_time(ms)

    def teardown(self):
        if self.world is None or self.world.broken:
            return
        if not self.world.executors:
            self._join(self.pool, (2, 8))
        self.world.drain()


COMMON = settings(
    deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@pytest.mark.timeout(300)
class TestScheduler(SchedulerMachine.TestCase):
    """The same few thousand steps on every run; ``test_scheduler_tape.py`` takes very many more."""

    settings = settings(COMMON, max_examples=200, stateful_step_count=60, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(0)
class TestSchedulerSoak(SchedulerMachine.TestCase):
    """Other steps on every run, and very many; failures are kept in Hypothesis's database."""

    settings = settings(COMMON, max_examples=100_000, stateful_step_count=100)


ROOT = Path(__file__).parents[2]
ONE_WORLD = """
import hashlib, msgspec
from services.scheduler.core.limits import Settings
from shared.wire import tokens
from shared.wire.facts import ExecutorLimits
from tests.fakes.core_settings import core_settings
from tests.fakes.scheduler_world import World

world = World(Settings(max_inflight=2))
gateways = [world.join_gateway() for _ in range(3)]
executors = [world.join_executor(ExecutorLimits(7, 2, 3, 5)).id for _ in range(2)]
digest = hashlib.sha256()
for i in range(30):
    world.submit(gateways[i % 3], [i % 2] * (1 + i % 7), 1 + i % 5, ignore_eos=True, priority=i % 2, request_id=f"r{i}")
    world.run_step(executors[i % 2])
world.leave_gateway(gateways[0])
world.kill_executor(executors[0])
world.drain()
print(hashlib.sha256(msgspec.msgpack.encode(world.actions)).hexdigest())
"""


def test_actions_do_not_depend_on_the_process():
    """R13: equal bytes in processes that hash strings differently."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", ONE_WORLD],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1
