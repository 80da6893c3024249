"""tests/cases.md has a row for each of the 48 cases, and names only tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"^\| (\w+) (\d+) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
NUM_CASES = 48


def test_every_case_has_a_row_and_every_test_in_it_exists() -> None:
    rows = ROW.findall((TESTS / "cases.md").read_text())
    assert {int(number) for _, number, _ in rows} == set(range(1, NUM_CASES + 1))
    for area, number, cell in rows:
        groups = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", cell)
        assert groups, f"{area} {number} has no test"
        for file, names in groups:
            source = (TESTS / file).read_text()
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"\bdef {name}\(", source), f"{area} {number}: {file} has no {name}"


def test_a_test_that_is_named_after_a_case_is_in_its_row() -> None:
    cells: dict[tuple[str, int], str] = {}
    for area, number, cell in ROW.findall((TESTS / "cases.md").read_text()):
        key = (area.lower(), int(number))
        cells[key] = cells.get(key, "") + cell
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, area, number in re.findall(r"def (test_([a-z]+)_(\d\d)_\w+)", path.read_text()):
            cell = cells.get((area, int(number)))
            if cell is not None:
                assert f"`{name}`" in cell, f"{path.relative_to(TESTS)}: {name} is not in the row of its case"
