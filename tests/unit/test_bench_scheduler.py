"""The bench measures ticks in which everybody decodes, with the queue and the cache it names."""

import json
from pathlib import Path

from services.scheduler.core.debug_state import debug_state
from tools.bench.scheduler import CACHED_PROMPT_BLOCKS, EXECUTOR, Bench, measure, run


def test_every_tick_is_a_decode_of_everybody() -> None:
    bench = Bench(running=8, queue=20, cached_blocks=CACHED_PROMPT_BLOCKS, ticks=20)
    for _ in range(20):
        assert bench.tick() >= 0
        assert all(len(step.samples) == 8 for step in bench.core.executors[EXECUTOR].inflight)
    state = debug_state(bench.core)
    assert (state["running"], state["waiting"]) == (8, 20)


def test_a_row_names_what_was_there() -> None:
    row = measure(running=4, queue=10, cached_blocks=CACHED_PROMPT_BLOCKS, ticks=20)
    assert (row.running, row.queue) == (4, 10)
    assert row.cached_blocks >= CACHED_PROMPT_BLOCKS - 2
    assert 0 < row.us_per_request <= row.us_per_tick


def test_the_cost_of_a_tick_does_not_grow_with_queue_and_cache() -> None:
    alone = measure(running=64, queue=0, cached_blocks=0, ticks=200)
    crowded = measure(running=64, queue=5000, cached_blocks=10 * CACHED_PROMPT_BLOCKS, ticks=200)
    assert crowded.us_per_tick < 3 * alone.us_per_tick


def test_the_file_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    assert run([2, 4], 0, 0, 10, str(tmp_path / "f.json")) == 0
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [row["running"] for row in rows] == [2, 4]
    assert all({"us_per_tick", "us_per_request"} <= set(row) for row in rows)
