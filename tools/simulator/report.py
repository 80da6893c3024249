"""What ``paternoster simulate`` prints and writes. Called by ``command``."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.occupancy import text
from tools.occupancy.page import Panel, page
from tools.occupancy.record import Recorder
from tools.simulator import curve, sweep
from tools.simulator.engine import Model
from tools.simulator.figures import Row

RUNS_ABREAST = 3
"""What a terminal of 80 columns shows uncut."""


@dataclass(frozen=True)
class Shown:
    """What to write, besides the table."""

    json_file: str
    picture: str
    steps: int
    """Of each picture."""


def rows(model: Model, load: sweep.MakeWorkload, executors: list[int], budgets: list[int], shown: Shown) -> int:
    """A sweep; one row is the smallest. Returns the exit code."""
    found = []
    if len(executors) == len(budgets) == 1:
        recorder = Recorder(1, shown.steps) if shown.picture else None
        found.append(sweep.run(model, load(), recorder))
        if recorder is not None:
            of = f", the first of {executors[0]}" if executors[0] > 1 else ""
            panels = [Panel(rows.executor + of, _note(found[0]), [rows]) for rows in recorder.executors.values()]
            Path(shown.picture).write_text(page("Lanes by steps", panels))
    else:
        found += sweep.grid(model, load, executors, budgets)
        if shown.picture:
            Path(shown.picture).write_text(curve.page(found))
    _table(found)
    _write(shown, {"rows": [asdict(row) for row in found]})
    return 0


def find(model: Model, load: sweep.MakeWorkload, attain: float, shown: Shown) -> int:
    """How many executors for this load at this limit? Returns the exit code: 1 when no fleet will do."""
    found = list(sweep.smallest_fleet(model, load, attain))
    enough = min((row.executors for row in found if row.good_share >= attain), default=None)
    _table(sorted(found, key=lambda row: row.executors))
    goal = f"{attain:.0%} of the requests within their limits"
    if enough is None:
        Console().print(f"{sweep.MOST_EXECUTORS} executors are not enough for {goal}")
    else:
        Console().print(f"{enough} executors are enough for {goal}")
    _write(shown, {"rows": [asdict(row) for row in found], "executors_needed": enough})
    return 1 if enough is None else 0


def policies(model: Model, load: sweep.MakeWorkload, names: list[Any], shown: Shown) -> int:
    """Policies side by side on the same arrivals. Returns the exit code."""
    compared = list(sweep.compare(model, load, names, 1, shown.steps))
    _table([one.row for one in compared])
    for one in compared:
        for recorded in one.recorder.executors.values():
            print(f"{one.policy}: {text.LEGEND}")
            print(*text.draw(recorded), sep="\n")
    if shown.picture:
        panels = [Panel(one.policy, _note(one.row), list(one.recorder.executors.values())) for one in compared]
        Path(shown.picture).write_text(
            page("Policies on the same arrivals", panels, policy_table(one.row for one in compared))
        )
    _write(shown, {"policies": {one.policy: asdict(one.row) for one in compared}})
    return 0


def policy_table(found: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows for the page."""
    head = ["policy", "busy share", "output tokens/s", "TTFT p50, p99 ms", "TPOT p50, p99 ms", "steps"]
    return head, [
        [
            str(row.settings.get("policy", "")),
            _share(row.busy_share),
            f"{row.output_tokens_per_s:.0f}",
            _two(row.ttft_ms),
            _two(row.tpot_ms),
            str(row.steps),
        ]
        for row in found
    ]


def _note(row: Row) -> str:
    whose = "all executors: " if row.executors > 1 else ""
    return (
        f"{whose}busy share while others wait {_share(row.busy_share)}, {row.output_tokens_per_s:.0f} output tokens/s"
    )


def _table(found: list[Row]) -> None:
    """One column a run; where they are many, tables of as many as are read at a glance."""
    for start in range(0, len(found), RUNS_ABREAST):
        _columns(found[start : start + RUNS_ABREAST])


def _columns(found: list[Row]) -> None:
    varied = dict.fromkeys(name for row in found for name in row.settings)
    table = Table(title="simulated", show_header=False)
    table.add_column()
    for _ in found:
        table.add_column(justify="right")
    for name in varied:
        table.add_row(name.replace("_", " "), *(str(row.settings[name]) for row in found), end_section=True)
    for title, cells in _lines(found):
        table.add_row(title, *cells)
    Console().print(table)


def _lines(found: list[Row]) -> Iterator[tuple[str, list[str]]]:
    """Heading and figures of each line."""
    yield "executors", [str(row.executors) for row in found]
    yield "requests", [str(row.requests) for row in found]
    yield "output tokens/s", [f"{row.output_tokens_per_s:.1f}" for row in found]
    yield "requests/s", [f"{row.requests_per_s:.2f}" for row in found]
    yield "goodput, requests/s", [f"{row.goodput_rps:.2f}" for row in found]
    for p in ("p50", "p99"):
        yield f"TTFT {p} ms", [_number(row.ttft_ms[p]) for row in found]
    for p in ("p50", "p99"):
        yield f"TPOT {p} ms", [_number(row.tpot_ms[p]) for row in found]
    yield "steps", [str(row.steps) for row in found]
    yield "busy share while others wait", [_share(row.busy_share) for row in found]
    yield "requests held, per executor", [_number(row.held_per_executor) for row in found]
    yield "share of the pool that holds data", [_share(row.stored_share) for row in found]
    yield "preemptions", [str(row.preemptions) for row in found]
    yield "cache hit rate", [_share(row.cache_hit_rate) for row in found]
    yield "rejected, failed", [f"{row.rejected}, {row.failed}" for row in found]
    yield "virtual seconds", [f"{row.seconds:.1f}" for row in found]
    yield "events, events/s", [f"{row.events}, {row.events_per_s}" for row in found]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _two(values: dict[str, float | None]) -> str:
    return " ".join(_number(values[p]) for p in ("p50", "p99"))


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.3f}"


def _write(shown: Shown, report: dict[str, Any]) -> None:
    if shown.json_file:
        Path(shown.json_file).write_text(json.dumps(report, indent=2) + "\n")
