"""The simulation is the real scheduler: bounded by arithmetic that can be done by hand, the same on every run."""

import dataclasses
import gc
from collections.abc import Iterator

import pytest

from services.scheduler.core import invariants
from services.scheduler.core.debug_state import debug_state
from services.scheduler.core.limits import Settings
from shared.wire.facts import ExecutorLimits
from tools.bench.figures import Limits
from tools.bench.workload import Lengths, arrivals
from tools.simulator import sweep
from tools.simulator.costs import Costs
from tools.simulator.engine import Model, Simulation
from tools.simulator.figures import Row
from tools.simulator.workload import Arrival, Closed, Independent, Numbers, Sessions, bursts

MODEL = Model(
    settings=Settings(),
    executors=1,
    limits=ExecutorLimits(512, 16, 8, 256),
    context_len=4096,
    costs=Costs.line(10_000, 100, 0, 0, 0),
)


class Fixed:
    """Given arrivals."""

    def __init__(self, *comers: Arrival) -> None:
        self._comers = comers

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._comers)

    def after(self, ended: Arrival, now_us: int, answered: bool) -> Arrival | None:
        return None


def poisson(rate: float = 10, num_requests: int = 200) -> Independent:
    return Independent(arrivals(1, rate), Lengths.parse("exp:64"), Lengths.parse("exp:32"), 1, num_requests)


def test_one_request_alone_takes_what_its_steps_take() -> None:
    simulation = Simulation(MODEL, Fixed(Arrival(0, Numbers().prompt(100), 5)))
    row = simulation.run()
    prefill_us, decode_us = 10_000 + 100 * 100, 10_000 + 100
    assert row.ttft_ms["p50"] == prefill_us / 1000
    assert row.tpot_ms["p50"] == decode_us / 1000
    assert row.seconds == pytest.approx((prefill_us + 4 * decode_us) / 1e6, abs=1e-3)
    assert (row.steps, row.requests, row.rejected, row.failed) == (5, 1, 0, 0)


def test_overhead_lies_between_steps_and_the_link_is_hidden_behind_a_running_step() -> None:
    costs = Costs.line(10_000, 0, 0, 300, 1000)
    one = Simulation(dataclasses.replace(MODEL, costs=costs), Fixed(Arrival(0, Numbers().prompt(10), 11))).run()
    assert one.tpot_ms["p50"] == pytest.approx(10.3)
    settings = Settings(max_inflight=1)
    model = dataclasses.replace(MODEL, costs=costs, settings=settings)
    alone = Simulation(model, Fixed(Arrival(0, Numbers().prompt(10), 11))).run()
    assert alone.tpot_ms["p50"] == pytest.approx(12.0)


def test_every_token_is_delivered_and_nothing_is_left() -> None:
    load = poisson()
    wanted = sum(arrival.num_output for arrival in poisson().arrivals())
    simulation = Simulation(MODEL, load)
    row = simulation.run()
    assert simulation.tally.output_tokens == wanted
    assert row.requests == 200
    invariants.check(simulation.core)
    state = debug_state(simulation.core)
    assert (state["waiting"], state["running"]) == (0, 0)


def test_the_same_load_gives_the_same_figures() -> None:
    first, second = (Simulation(MODEL, poisson()).run() for _ in range(2))
    assert dataclasses.replace(first, events_per_s=0) == dataclasses.replace(second, events_per_s=0)


def test_more_executors_never_serve_less() -> None:
    rows = list(sweep.grid(MODEL, lambda: poisson(rate=1000), [1, 2, 4], [256]))
    rates = [row.output_tokens_per_s for row in rows]
    assert rates == sorted(rates)
    assert [row.executors for row in rows] == [1, 2, 4]
    assert rows[2].ttft_ms["p50"] < rows[0].ttft_ms["p50"]  # type: ignore[operator]


def test_a_small_pool_preempts_and_still_delivers_everything() -> None:
    tight = dataclasses.replace(MODEL, limits=ExecutorLimits(40, 16, 8, 256))
    load = Independent(bursts(20, 1.0), Lengths.parse("100"), Lengths.parse("200"), 1, 20)
    row = Simulation(tight, load).run()
    assert row.preemptions > 0
    assert row.requests == 20
    assert row.failed == 0


def test_a_budget_trades_time_to_first_token_for_time_between_tokens() -> None:
    def load() -> Independent:
        return Independent(arrivals(3, 4), Lengths.parse("600"), Lengths.parse("60"), 3, 60)

    # Without the budget in time, which would cut chunks by itself.
    model = dataclasses.replace(MODEL, settings=Settings(step_time_budget_ms=100_000))
    small, large = sweep.grid(model, load, [1], [32, 600])
    assert small.settings == {"max_step_tokens": 32}
    assert small.tpot_ms["p99"] < large.tpot_ms["p99"]  # type: ignore[operator]
    assert small.ttft_ms["p50"] > large.ttft_ms["p50"]  # type: ignore[operator]


def test_the_smallest_fleet_is_enough_and_one_less_is_not() -> None:
    model = dataclasses.replace(MODEL, goals=Limits(ttft_ms=200))
    rows = {row.executors: row for row in sweep.smallest_fleet(model, lambda: poisson(rate=60), attain=0.95)}
    enough = min(count for count, row in rows.items() if row.good_share >= 0.95)
    assert enough > 1
    assert rows[enough - 1].good_share < 0.95


def test_requests_that_stop_by_themselves_do_so_at_their_length() -> None:
    model = dataclasses.replace(MODEL, max_tokens=500)
    wanted = [arrival.num_output for arrival in poisson().arrivals()]
    simulation = Simulation(model, poisson())
    simulation.run()
    assert simulation.tally.output_tokens == sum(wanted)
    assert simulation.core.counters.ended["stop"] == len(wanted)


def test_sessions_find_what_was_said_before_in_the_cache() -> None:
    def sessions() -> Sessions:
        lengths = Lengths.parse("32:64")
        return Sessions(arrivals(1, 2), 20, Lengths.parse("4"), 1.0, lengths, lengths, 1, 4096)

    row = Simulation(MODEL, sessions()).run()
    assert row.requests == 80
    assert row.cache_hit_rate > 0.4
    without = Simulation(dataclasses.replace(MODEL, settings=Settings(prefix_cache=False)), sessions()).run()
    assert without.cache_hit_rate == 0
    assert row.ttft_ms["p50"] < without.ttft_ms["p50"]  # type: ignore[operator]


def test_continuous_keeps_lanes_busy_and_static_wastes_them() -> None:
    def load() -> Independent:
        return Independent(bursts(64, 1.0), Lengths.parse("exp:32"), Lengths.parse("exp:64"), 5, 64)

    model = dataclasses.replace(MODEL, settings=Settings(static_batch_size=8))
    shares = {
        one.policy: one.row.busy_share
        for one in sweep.compare(model, load, ["static", "prefill-first", "continuous"], 1, 100)
    }
    assert shares["continuous"] > 0.95  # type: ignore[operator]
    assert shares["static"] < 0.6  # type: ignore[operator]
    assert shares["static"] < shares["prefill-first"] < shares["continuous"]  # type: ignore[operator]


def test_reserving_the_longest_output_holds_fewer_requests_and_fills_less_of_the_pool() -> None:
    def load() -> Independent:
        return Independent(bursts(60, 1.0), Lengths.parse("64"), Lengths.parse("exp:64:400"), 5, 60)

    def served(reserve: bool) -> Row:
        model = dataclasses.replace(
            MODEL,
            settings=Settings(kv_reserve=reserve),
            limits=ExecutorLimits(128, 16, 32, 512),
            max_tokens=448,
        )
        return Simulation(model, load()).run()

    paged, reserved = served(False), served(True)
    assert reserved.requests == paged.requests == 60
    assert reserved.preemptions == 0
    # 64 and 448 tokens are 32 blocks: four requests, and no more, fit into 128.
    assert reserved.held_per_executor is not None
    assert reserved.held_per_executor <= 4
    assert paged.held_per_executor > 2 * reserved.held_per_executor  # type: ignore[operator]
    assert paged.stored_share > 2 * reserved.stored_share  # type: ignore[operator]
    assert paged.output_tokens_per_s > reserved.output_tokens_per_s


def test_a_client_that_is_refused_sends_its_next_request() -> None:
    """As those of ``bench serve`` do: the load is that of all clients, whoever is refused."""
    model = dataclasses.replace(MODEL, settings=Settings(max_queue=1), limits=ExecutorLimits(512, 16, 1, 256))
    load = Closed(4, 7000, Lengths.parse("50"), Lengths.parse("20"), 0, 60)
    row = Simulation(model, load).run()
    assert row.requests == 60
    assert 0 < row.rejected < 60


def test_a_client_of_a_closed_loop_waits_for_its_answer_and_a_little_more() -> None:
    costs = dataclasses.replace(MODEL.costs, client_us=7000)
    load = Closed(1, 7000, Lengths.parse("50"), Lengths.parse("5"), 0, 3)
    row = Simulation(dataclasses.replace(MODEL, costs=costs), load).run()
    prefill_us, decode_us = 10_000 + 100 * 50, 10_000 + 100
    assert row.requests == 3
    assert row.seconds == pytest.approx((3 * (prefill_us + 4 * decode_us) + 2 * 7000) / 1e6, abs=1e-3)
    assert row.ttft_ms["p50"] == pytest.approx((prefill_us + 7000) / 1000)
    assert row.tpot_ms["p50"] == pytest.approx(decode_us / 1000)


def test_a_simulation_leaves_no_cycles() -> None:
    """It runs without the garbage collector."""
    gc.collect()
    simulation = Simulation(MODEL, poisson())
    simulation.run()
    del simulation
    assert gc.collect() < 100
