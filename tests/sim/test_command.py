"""``paternoster simulate`` as a user meets it."""

import json
from pathlib import Path

import pytest

from tests.unit.test_cli import one_error_line, paternoster

SMALL = ("simulate", "--num-requests=20", "--prompt-tokens=16:64", "--output-tokens=4:16", "--max-lanes=4")
KEYS = {
    "executors",
    "requests",
    "output_tokens_per_s",
    "goodput_rps",
    "ttft_ms",
    "tpot_ms",
    "busy_share",
    "preemptions",
    "cache_hit_rate",
    "events_per_s",
}


def figures(tmp_path: Path, *arguments: str) -> tuple[dict, str]:
    result = paternoster(*SMALL, *arguments, f"--json={tmp_path / 'f.json'}")
    assert result.returncode == 0, result.stderr
    return json.loads((tmp_path / "f.json").read_text()), result.stdout


def test_a_sweep_is_one_row_a_fleet(tmp_path: Path) -> None:
    report, printed = figures(tmp_path, "--executors=1,2", "--rate=20")
    assert [row["executors"] for row in report["rows"]] == [1, 2]
    assert all(set(row) >= KEYS for row in report["rows"])
    assert "output tokens/s" in printed


def test_policies_are_told_and_drawn_side_by_side(tmp_path: Path) -> None:
    report, printed = figures(tmp_path, "--policies=all", f"--picture={tmp_path / 'p.html'}")
    assert set(report["policies"]) == {"continuous", "prefill-first", "static"}
    for row in report["policies"].values():
        assert set(row) >= {"busy_share", "output_tokens_per_s", "ttft_ms", "tpot_ms", "steps"}
    assert (tmp_path / "p.html").read_text().count("aria-label") == 3
    assert printed.count("lane 0 |") == 3


def test_how_many_executors_is_answered(tmp_path: Path) -> None:
    report, printed = figures(tmp_path, "--find", "--rate=50", "--ttft-limit-ms=400", "--attain=0.9")
    assert report["executors_needed"] >= 1
    assert "executors are enough" in printed


def test_a_sweep_over_the_budget_draws_what_it_trades(tmp_path: Path) -> None:
    report, _ = figures(tmp_path, "--max-step-tokens=32,128", f"--picture={tmp_path / 'p.html'}")
    drawn = (tmp_path / "p.html").read_text()
    assert [row["settings"]["max_step_tokens"] for row in report["rows"]] == [32, 128]
    assert "TTFT over TPOT" in drawn
    assert drawn.count("<circle") == 2
    assert "1 executor, max step tokens 128" in drawn


def test_one_run_can_be_drawn(tmp_path: Path) -> None:
    figures(tmp_path, f"--picture={tmp_path / 'p.html'}", "--kv=reserve", "--max-tokens=64")
    assert "<svg" in (tmp_path / "p.html").read_text()


def test_a_closed_loop(tmp_path: Path) -> None:
    report, _ = figures(tmp_path, "--concurrency=3", "--client-ms=5")
    assert report["rows"][0]["requests"] == 20
    assert report["rows"][0]["ttft_ms"]["p50"] > 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--executors=1,x"], "'1,x' is not one or more whole numbers"),
        (["--policies=magic"], "'magic' is none of continuous"),
        (["--rate=1", "--burst=3:1"], "only one of"),
        (["--concurrency=2", "--turns=3"], "conversations come"),
        (["--burst=3"], "'3' is not SIZE:SECONDS"),
        (["--trace=/no/such/file"], "/no/such/file"),
        (["--fit=/no/such/file"], "/no/such/file"),
        (["--prompt-tokens=9:3"], "must hold whole numbers"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str) -> None:
    assert message in one_error_line(paternoster("simulate", *arguments))
