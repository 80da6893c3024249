"""docs/api.md names every field that is honoured or refused, and every route."""

import re
from pathlib import Path

import pytest
from msgspec import Struct

from services.gateway.api.messages_request import MessagesRequest
from services.gateway.api.observe import ROUTES
from services.gateway.api.refusals import MESSAGES, NEUTRAL, RESPONSES, Others
from services.gateway.api.responses_request import ResponsesRequest
from services.gateway.api.schema import ChatRequest, CompletionRequest, StreamOptions

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def fields_of(title: str) -> set[str]:
    rows = [line for line in section(title).splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}


def test_every_honoured_field_is_on_the_page() -> None:
    assert fields_of("Honoured fields") == {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert all(f"`{name}`" in PAGE for name in StreamOptions.__struct_fields__)


def test_every_refused_field_is_on_the_page() -> None:
    assert set(re.findall(r"`([a-z_]+)`", section("Refused fields"))) == set(NEUTRAL)


@pytest.mark.parametrize(
    ("title", "schema", "others"),
    [("Responses", ResponsesRequest, RESPONSES), ("Messages", MessagesRequest, MESSAGES)],
)
def test_every_field_of_the_other_apis_is_on_the_page(title: str, schema: type[Struct], others: Others) -> None:
    assert fields_of(title) == set(schema.__struct_fields__)
    assert set(re.findall(r"`([a-z_]+)`", section(title).split("\nRefused: ")[1].split(".")[0])) == set(others.refused)


def test_every_route_is_on_the_page() -> None:
    assert all(f"{route}`" in section("Routes") for route in ROUTES)
