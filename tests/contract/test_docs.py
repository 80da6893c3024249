"""Links between the pages of the documentation lead somewhere, and each decision record has a number of its own."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    num_links = 0
    for page in PAGES:
        for path, anchor in LINK.findall(page.read_text()):
            if path.startswith(("http:", "https:")):
                continue
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name} links to {path}"
            assert not anchor or anchor in anchors_of(target), f"{page.name} links to {path}#{anchor}"
            num_links += 1
    assert num_links > 20


def test_each_decision_record_has_a_number_of_its_own() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))
    numbers = [int(record.name[:4]) for record in records]
    assert len(set(numbers)) == len(numbers) > 20, numbers
    for record, number in zip(records, numbers, strict=True):
        assert record.read_text().startswith(f"# {number}. "), record.name
