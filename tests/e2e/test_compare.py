"""``paternoster bench compare`` on the real system with the fake backend: the lesson, measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_continuous_keeps_lanes_busy_where_static_wastes_them(tmp_path: Path) -> None:
    arguments = ["--backend=fake", "--num-requests=24", "--max-lanes=4", "--prompt-tokens=8:32", "--output-tokens=2:40"]
    files = [f"--picture={tmp_path / 'p.html'}", f"--json={tmp_path / 'f.json'}"]
    result = subprocess.run(
        [sys.executable, "-m", "tools.main", "bench", "compare", "--policies=static,continuous", *arguments, *files],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PATERNOSTER_")},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    policies = json.loads((tmp_path / "f.json").read_text())["policies"]
    static, continuous = policies["static"], policies["continuous"]
    assert static["failed"] == continuous["failed"] == 0
    assert continuous["busy_share"] > 0.8
    assert static["busy_share"] < continuous["busy_share"] - 0.1
    assert static["steps"] > continuous["steps"]
    assert {"output_tokens_per_s", "ttft_ms", "tpot_ms"} <= set(static)
    assert (tmp_path / "p.html").read_text().count("aria-label") == 2
