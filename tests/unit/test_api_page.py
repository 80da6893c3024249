"""docs/api.md names every field that is honoured or refused, and every route."""

import re
from pathlib import Path

from services.gateway.api.observe import ROUTES
from services.gateway.api.refusals import NEUTRAL
from services.gateway.api.schema import ChatRequest, CompletionRequest, StreamOptions

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_honoured_field_is_on_the_page() -> None:
    rows = [line for line in section("Honoured fields").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert named == {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert all(f"`{name}`" in PAGE for name in StreamOptions.__struct_fields__)


def test_every_refused_field_is_on_the_page() -> None:
    assert set(re.findall(r"`([a-z_]+)`", section("Refused fields"))) - {"none", "tool_choice"} == set(NEUTRAL)


def test_every_route_is_on_the_page() -> None:
    assert all(f"{route}`" in section("Routes") for route in ROUTES)
