"""The virtual token counter: order between tenants, weights, and no credit for idle time."""

import pytest

from services.scheduler.core.fairness import FairQueue
from services.scheduler.core.limits import Settings
from services.scheduler.core.request import Rank, Request
from services.scheduler.core.waiting import WaitingQueue
from shared.wire import tokens
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Submit, TenantLimits
from shared.wire.sampling import Sampling
from tests.fakes.scheduler_world import World

FACTS = ModelFacts("plain", 1000, 8192, [], "fake")


def request_of(queue, tenant, num_prompt=10, **fields):
    number = queue.ticket()
    request = Request(
        "g", Submit(f"{tenant}{number}", tokens.pack([1] * num_prompt), Sampling(), 10, tenant=tenant, **fields), number
    )
    queue.open(request)
    queue.push(request)
    return request


def names(requests):
    return "".join(request.submit.tenant for request in requests)


def admit_next(queue):
    (request,) = queue.head(1)
    queue.admit(request)
    return request


def test_tenants_take_turns_and_looking_ahead_says_how():
    queue = WaitingQueue(Settings())
    for tenant in "aaaabbc":
        request_of(queue, tenant)
    assert names(queue.head(7)) == "abcabaa"
    assert names(queue.head(2)) == "ab"
    assert names(admit_next(queue) for _ in range(7)) == "abcabaa"
    assert not queue.head(1)


def test_a_prompt_costs_its_tokens():
    queue = WaitingQueue(Settings())
    request_of(queue, "a", 30)
    for tenant in "abbbb":
        request_of(queue, tenant)
    assert names(queue.head(6)) == "abbbab"


@pytest.mark.parametrize(("settings", "order"), [({}, "abaabaaba"), ({"tenant_weights": {"a": 1.0}}, "ababab" + "aaa")])
def test_a_weight_may_come_with_the_requests_unless_the_scheduler_has_its_own(settings, order):
    queue = WaitingQueue(Settings(**settings))
    for tenant in "aaaaaabbb":
        request_of(queue, tenant, limits=TenantLimits(weight=2.0 if tenant == "a" else None))
    assert names(queue.head(9)) == order


def test_a_tenant_of_twice_the_weight_gets_twice_as_much():
    queue = WaitingQueue(Settings(tenant_weights={"a": 2.0}))
    for tenant in "aaaaaabbb":
        request_of(queue, tenant)
    assert names(queue.head(9)) == "abaabaaba"


def test_output_tokens_are_charged_as_they_come():
    queue = WaitingQueue(Settings())
    first = request_of(queue, "a", 2)
    for tenant in "aabb":
        request_of(queue, tenant, 4)
    admit_next(queue)
    assert names(queue.head(3)) == "bab"
    first.account.counter += 3 * first.account.output_cost
    assert names(queue.head(4)) == "bbaa"


def test_idle_time_earns_no_credit():
    queue = WaitingQueue(Settings())
    for _ in range(8):
        request_of(queue, "a")
    for _ in range(6):
        admit_next(queue)
    for _ in range(3):
        request_of(queue, "b")
    assert names(queue.head(5)) == "ababb", "b comes in at a's level"


def test_a_newcomer_to_an_empty_queue_starts_where_the_last_one_left():
    queue = WaitingQueue(Settings())
    request_of(queue, "a", 50)
    running = admit_next(queue)
    request_of(queue, "b")
    request_of(queue, "b")
    request_of(queue, "a")
    assert [request.account.counter for request in queue.head(3)] == [50.0] * 3
    assert running.account.counter == 50.0
    assert names(queue.head(3)) == "bab"


def test_whoever_has_run_goes_first_and_does_not_pay_again():
    queue = WaitingQueue(Settings())
    for tenant in "aab":
        request_of(queue, tenant)
    one, two = admit_next(queue), admit_next(queue)
    paid = one.account.counter
    queue.push(two)
    queue.push(one)
    assert queue.head(3)[:2] == [one, two], "in order of their first admission"
    assert admit_next(queue) is one
    assert one.account.counter == paid


def test_accounts_of_a_priority_are_forgotten_with_its_last_request():
    queue = WaitingQueue(Settings())
    request = request_of(queue, "a", priority=3)
    admit_next(queue)
    assert list(queue.queues()) == [3]
    queue.close(request)
    assert not queue.queues()


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_a_plain_definition(seed):
    """Random arrivals, services and leavings against a pass over everybody."""
    import random

    pick = random.Random(seed)
    queue = WaitingQueue(Settings())
    waiting = []
    for _ in range(200):
        what = pick.random()
        if what < 0.5 or not waiting:
            waiting.append(request_of(queue, pick.choice("abcde"), pick.randint(1, 9)))
        elif what < 0.7:
            request = pick.choice(waiting)
            waiting.remove(request)
            queue.discard(request)
            if pick.random() < 0.5:  # comes back at its old place
                waiting.append(request)
                queue.push(request)
        elif what < 0.8:
            request = pick.choice(waiting)
            request.account.counter += pick.randint(1, 20)
        else:
            waiting.remove(admit_next(queue))
        assert queue.head(len(waiting)) == plain_order(waiting)
        assert queue.head(3) == plain_order(waiting)[:3]


def plain_order(waiting):
    counters = {request.account: request.account.counter for request in waiting}
    left = sorted(waiting, key=lambda request: request.rank)
    order = []
    while left:
        account = min(
            {request.account for request in left},
            key=lambda account: (counters[account], min(r.rank.ticket for r in left if r.account is account)),
        )
        request = next(request for request in left if request.account is account)
        counters[account] += account.input_cost(request)
        left.remove(request)
        order.append(request)
    return order


def test_10_000_waiting_requests_are_never_passed_over():
    """Counts the requests whose rank is looked at, at 100 and at 10,000 waiting."""
    assert looks(10_000) <= looks(100) + 60


def looks(count):
    queue = WaitingQueue(Settings())
    for number in range(count):
        request_of(queue, f"tenant {number % 50}")
    seen = 0

    class Watched(Rank):
        def __getattribute__(self, name):
            nonlocal seen
            seen += 1
            return super().__getattribute__(name)

    for request in queue.all():
        request.rank = Watched(*request.rank)
    for _ in range(5):
        admit_next(queue)
        queue.head(32)
    return seen


def test_a_flood_of_one_tenant_does_not_delay_another():
    world = World(Settings(max_inflight=1), FACTS)
    gateway = world.join_gateway()
    executor = world.join_executor(ExecutorLimits(600, 16, 4, 512))
    flood = [world.submit(gateway, [i % 7] * 20, 6, tenant="flood") for i in range(60)]
    world.run_step(executor.id)
    other = [world.submit(gateway, [9] * 20, 6, tenant="other") for _ in range(4)]
    for _ in range(20):
        world.run_step(executor.id)
    assert all(stream.end for stream in other)
    assert sum(bool(stream.end) for stream in flood) <= 12
    world.drain()


def test_what_goes_before_a_newcomer_is_what_its_tenant_s_counter_says():
    queue = WaitingQueue(Settings())
    back = request_of(queue, "a", 7)
    queue.admit(back)
    for _ in range(5):
        request_of(queue, "a", 10)
    queue.push(back)
    for _ in range(2):
        request_of(queue, "b", 10)
    fair = queue.queues()[0]
    assert fair.ahead("a", 1.0) == (1 + 5 + 2, 7 + 50 + 20)
    assert fair.ahead("b", 1.0) == (1 + 2 + 2, 7 + 20 + 20)
    assert fair.ahead("c", 1.0) == (1, 7), "it comes in at the smallest counter"
    urgent = Request("g", Submit("u", tokens.pack([1]), Sampling(), 1, priority=-1), 99)
    patient = Request("g", Submit("p", tokens.pack([1]), Sampling(), 1, priority=1), 99)
    assert queue.ahead(urgent) == (0, 0)
    assert queue.ahead(patient) == (8, 77)


def test_an_empty_queue_has_no_head():
    assert FairQueue().head(3) == []


def test_a_prompt_costs_its_tokens_whether_they_are_computed_or_found_in_the_cache():
    """Tokens served are what is shared; what a cache saves is given to everybody."""
    world = World(Settings(max_inflight=1), FACTS)
    gateway = world.join_gateway()
    executor = world.join_executor(ExecutorLimits(64, 4, 4, 64))
    prompt = list(range(2, 34))
    world.submit(gateway, prompt, 50, tenant="a")
    (account,) = [queue.accounts["a"] for queue in world.scheduler.ledger.queue.queues().values()]
    for _ in range(3):
        world.run_step(executor.id)
    before = account.counter
    stream = world.submit(gateway, prompt, 50, tenant="a")
    world.run_step(executor.id)  # a token of the first one, and the second one is admitted
    assert account.counter == before + 2 + len(prompt)
    world.drain()
    assert stream.cached_tokens == 28
