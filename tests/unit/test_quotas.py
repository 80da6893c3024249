"""Limits of a tenant: what is refused, for how long, and what costs nothing."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.limits import Settings
from services.scheduler.core.quotas import MINUTE_MS, Bucket, Quota
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Rejected, TenantLimits
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")


class Limited:
    """A world in which requests are those of one tenant with limits."""

    def __init__(self, limits: TenantLimits, num_lanes: int = 8, **settings):
        self.world = World(Settings(**settings), FACTS)
        self.gateways = [self.world.join_gateway() for _ in range(2)]
        self.executor = self.world.join_executor(ExecutorLimits(400, 16, num_lanes, 512))
        self.limits = limits

    def submit(self, num_prompt=10, max_tokens=5, tenant="limited", gateway=0, **fields):
        """The stream, or the refusal."""
        fields = {"limits": self.limits, "tenant": tenant} | fields
        stream = self.world.submit(self.gateways[gateway], [1] * num_prompt, max_tokens, **fields)
        if stream.end != "rejected":
            return stream
        messages = [getattr(action, "message", None) for action in self.world.actions[-1]]
        return next(message for message in messages if isinstance(message, Rejected))


def code_of(answer):
    return answer.code if isinstance(answer, Rejected) else ""


@given(
    per_minute=st.integers(1, 10_000),
    happenings=st.lists(st.tuples(st.integers(0, 5 * MINUTE_MS), st.integers(0, 200)), max_size=30),
)
def test_a_bucket_gives_a_minutes_worth_at_once_and_its_rate_after_that(per_minute, happenings):
    bucket, now_ms, taken = Bucket(per_minute, 0), 0, 0
    for passed_ms, amount in happenings:
        now_ms += passed_ms
        wait_ms = bucket.wait_ms(amount, now_ms)
        if wait_ms:
            assert bucket.wait_ms(amount, now_ms + wait_ms - 1), "what is told is not too long"
            now_ms += wait_ms
        assert not bucket.wait_ms(amount, now_ms), "nor too short"
        bucket.take(min(amount, per_minute), now_ms)
        taken += min(amount, per_minute)
        assert taken <= per_minute + per_minute * now_ms // MINUTE_MS


def test_requests_a_minute_are_counted_over_all_gateways():
    limited = Limited(TenantLimits(requests_per_minute=4))
    assert [code_of(limited.submit(gateway=i % 2)) for i in range(5)] == ["", "", "", "", "rate_limited"]
    assert not code_of(limited.submit(tenant="other", limits=None))
    refused = limited.submit()
    assert refused.retry_after_ms == 15_000
    assert refused.detail == "the limit of 4 requests a minute is reached"
    limited.world.now_ms += 14_999
    assert code_of(limited.submit()) == "rate_limited"
    limited.world.now_ms += 1
    assert [code_of(limited.submit()) for _ in range(2)] == ["", "rate_limited"]


def test_tokens_a_minute_are_those_of_prompts_and_outputs():
    limited = Limited(TenantLimits(tokens_per_minute=60))
    assert not code_of(limited.submit(num_prompt=30, max_tokens=20))
    limited.world.drain()
    refused = limited.submit(num_prompt=20)
    assert (code_of(refused), refused.retry_after_ms) == ("rate_limited", 10_000 - limited.world.now_ms % 1000)
    assert not code_of(limited.submit(num_prompt=10)), "a shorter one still goes in"


def test_a_prompt_longer_than_a_minutes_tokens_is_taken_when_nothing_was_used():
    limited = Limited(TenantLimits(tokens_per_minute=60))
    assert not code_of(limited.submit(num_prompt=300))
    assert limited.submit(num_prompt=1).retry_after_ms == (300 - 60 + 1) * 1000


def test_requests_at_once_and_when_it_is_worth_trying_again():
    limited = Limited(TenantLimits(concurrency=2), retry_after_ms=700)
    streams = [limited.submit(max_tokens=400, gateway=i) for i in range(2)]
    refused = limited.submit()
    assert (code_of(refused), refused.retry_after_ms) == ("rate_limited", 700), "nothing was measured yet"
    for _ in range(100):
        limited.world.run_step(limited.executor.id)
    told_ms = limited.submit().retry_after_ms
    run_us = limited.executor.run_us()
    left_ms = 300 * run_us / 1000
    assert left_ms / 2 < told_ms < 2 * left_ms, (told_ms, left_ms)
    limited.world.cancel(limited.gateways[0], streams[0].submit.request_id)
    assert [code_of(limited.submit()) for _ in range(2)] == ["", "rate_limited"]


def test_what_never_ran_costs_nothing():
    limited = Limited(TenantLimits(requests_per_minute=3, tokens_per_minute=40), num_lanes=1)
    runs, waits = limited.submit(), limited.submit()
    for stream in (runs, waits):
        limited.world.cancel(limited.gateways[0], stream.submit.request_id)
    assert [code_of(limited.submit()) for _ in range(3)] == ["", "", "rate_limited"], "one of the two had run"


def test_one_that_another_limit_turns_away_costs_nothing():
    limited = Limited(TenantLimits(requests_per_minute=3), num_lanes=1, max_queue=1)
    assert [code_of(limited.submit()) for _ in range(4)] == ["", "", "queue_full", "queue_full"]
    limited.world.drain()
    assert not code_of(limited.submit())


def test_a_stream_that_was_accepted_before_is_never_refused():
    limited = Limited(TenantLimits(requests_per_minute=2, tokens_per_minute=25, concurrency=2))
    streams = [limited.submit(max_tokens=50) for _ in range(2)]
    limited.world.run_step(limited.executor.id)
    limited.world.restart_scheduler(executors_first=True)
    assert all(stream.accepted and not stream.end for stream in streams)
    refused = limited.submit()
    assert refused.detail == "the limit of 2 requests at once is reached", "they count all the same"
    limited.world.drain()
    assert [len(stream.tokens) for stream in streams] == [50, 50]


def test_other_limits_of_a_tenant_give_nothing_back():
    limited = Limited(TenantLimits(requests_per_minute=3))
    for _ in range(3):
        limited.submit()
    assert code_of(limited.submit(limits=TenantLimits(requests_per_minute=30))) == "rate_limited"
    limited.world.now_ms += 2_000
    assert not code_of(limited.submit(limits=TenantLimits(requests_per_minute=30)))
    assert not code_of(limited.submit(limits=TenantLimits(concurrency=9))), "no limit of requests any more"


def test_tenants_whose_quota_is_whole_again_are_forgotten():
    limited = Limited(TenantLimits(requests_per_minute=60))
    for number in range(50):
        limited.submit(tenant=f"tenant-{number}")
        limited.world.drain()
        limited.world.now_ms += 1_000
    assert len(limited.world.scheduler.ledger.quotas.by_tenant) == 1


def test_a_new_tenant_costs_the_same_however_many_there_are(monkeypatch):
    looked_at = []
    is_unused = Quota.is_unused
    monkeypatch.setattr(Quota, "is_unused", lambda quota, now_ms: looked_at.append(quota) or is_unused(quota, now_ms))
    limited = Limited(TenantLimits(requests_per_minute=60))
    for number in range(100):
        limited.submit(tenant=f"tenant-{number}", max_tokens=1)
    assert len(limited.world.scheduler.ledger.quotas.by_tenant) == 100
    assert len(looked_at) <= 2 * 100
    limited.world.drain()
    limited.world.now_ms += 1_000
    for number in range(100):
        limited.submit(tenant=f"other-{number}", max_tokens=1)
        limited.world.drain()
        limited.world.now_ms += 1_000
    assert len(limited.world.scheduler.ledger.quotas.by_tenant) <= 2, "all that are whole again have been looked at"
