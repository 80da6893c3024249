"""Tenants that have requests waiting get service by their weights, within the bound of arXiv 2401.00588."""

from itertools import combinations

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from services.scheduler.core.fairness import INPUT_COST, OUTPUT_COST
from services.scheduler.core.limits import Settings
from shared.wire.facts import ExecutorLimits
from tests.fakes.scheduler_world import World

LONGEST_PROMPT = 6
MOST_OUTPUT = 6

bursts = st.tuples(
    st.integers(0, 2),
    st.integers(1, 20),
    st.integers(1, LONGEST_PROMPT),
    st.integers(1, MOST_OUTPUT),
    st.integers(0, 20),
)
"""Tenant, requests, prompt tokens, output tokens, and steps that are run before the next burst."""


class Meter:
    """Measures what each tenant got, without looking at the scheduler's own counters."""

    def __init__(self, world, weights, bound):
        self.world, self.weights, self.bound = world, weights, bound
        self.streams = []
        self.admitted = set()
        self.spread = {}
        """Least and most lead of one tenant over another while both had requests waiting."""

    def service(self, tenant):
        inputs = sum(stream.num_prompt for stream in self.streams if self._got(stream, tenant))
        outputs = sum(len(stream.tokens) for stream in self.streams if stream.submit.tenant == tenant)
        return (INPUT_COST * inputs + OUTPUT_COST * outputs) / self.weights[tenant]

    def _got(self, stream, tenant):
        return stream.submit.tenant == tenant and stream.submit.request_id in self.admitted

    def check(self):
        queue = self.world.scheduler.ledger.queue.all()
        waiting = {request.submit.request_id for request in queue}
        self.admitted |= {s.submit.request_id for s in self.streams if s.submit.request_id not in waiting}
        backlogged = {request.submit.tenant for request in queue}
        for pair in combinations(sorted(self.weights), 2):
            if not backlogged.issuperset(pair):
                self.spread.pop(pair, None)
                continue
            lead = self.service(pair[0]) - self.service(pair[1])
            least, most = self.spread.get(pair, (lead, lead))
            self.spread[pair] = min(least, lead), max(most, lead)
            assert max(most, lead) - min(least, lead) <= self.bound, f"{pair} are {least}..{most} apart"


@settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(bursts, min_size=3, max_size=8),
    weights=st.lists(st.sampled_from([1.0, 1.0, 2.0]), min_size=3, max_size=3),
    lanes=st.integers(1, 2),
    num_executors=st.integers(1, 2),
    max_inflight=st.sampled_from([1, 2]),
    policy=st.sampled_from(["continuous", "prefill-first"]),
)
def test_a_backlogged_tenant_is_never_further_behind_than_the_bound(
    events, weights, lanes, num_executors, max_inflight, policy
):
    """Theorem 4.4: over any time in which two tenants have requests waiting, their service differs by 2 U at most.

    U is the larger of the longest prompt's cost and the cost of all tokens that can run at once, over the weight.
    """
    tenants = dict(zip("abc", weights, strict=True))
    core_settings = Settings(tenant_weights=tenants, max_inflight=max_inflight, policy=policy)
    world = World(core_settings, pool_slots=96 * 4)
    gateway = world.join_gateway()
    executors = [world.join_executor(ExecutorLimits(96, 4, lanes, 16)).id for _ in range(num_executors)]
    most_tokens = num_executors * lanes * (LONGEST_PROMPT + MOST_OUTPUT)
    bound = 2 * max(INPUT_COST * LONGEST_PROMPT, OUTPUT_COST * most_tokens) / min(weights)
    meter = Meter(world, tenants, bound)

    def run(steps):
        for _ in range(steps):
            for executor in executors:
                world.run_step(executor)
                meter.check()

    for which, count, num_prompt, max_tokens, steps in events:
        for _ in range(count):
            prompt = [which % 2] * num_prompt
            meter.streams.append(world.submit(gateway, prompt, max_tokens, ignore_eos=True, tenant="abc"[which]))
        meter.check()
        run(steps)
    while any(world.streams.values()):
        run(1)
    world.drain()
