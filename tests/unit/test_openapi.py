"""The description tells of every route, names no type that it does not have, and the page tells of all that it does."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from services.gateway.api.observe import ROUTES, route_of
from services.gateway.api.schema import ChatRequest
from services.gateway.app import routes
from services.gateway.openapi.description import SECURITY, describe
from services.gateway.openapi.page import page_of


@pytest.fixture(name="document")
def _document() -> dict[str, Any]:
    return describe(needs_key=True)


def values_of(name: str, node: Any) -> Iterator[Any]:
    """All values under a key, however deep."""
    if isinstance(node, dict):
        if name in node:
            yield node[name]
        for value in node.values():
            yield from values_of(name, value)
    elif isinstance(node, list):
        for value in node:
            yield from values_of(name, value)


def test_it_describes_every_route_and_no_other(document: dict[str, Any]) -> None:
    served = {(re.sub(":path}", "}", route.path), method.lower()) for route in routes() for method in route.methods}
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert described == {(path, method) for path, method in served if method != "head"}
    assert {route_of(path) for path, _ in described} == set(ROUTES)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    names = {reference.rsplit("/", 1)[1] for reference in values_of("$ref", document)}
    assert names <= set(document["components"]["schemas"])
    assert {"Error", "AnthropicError", "ChatRequest", "ChatMessage"} <= names
    operation_ids = list(values_of("operationId", document))
    assert len(operation_ids) == len(set(operation_ids))


def test_only_health_and_readiness_are_open(document: dict[str, Any]) -> None:
    assert document["security"] == [{name: []} for name in SECURITY]
    opened = {path for path, methods in document["paths"].items() if list(values_of("security", methods)) == [[]]}
    assert opened == {"/health", "/ready"}
    assert describe(needs_key=False)["security"] == []


def test_requests_are_described_to_the_bound(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatRequest"]
    assert set(chat["properties"]) == set(ChatRequest.__struct_fields__)
    assert chat["required"] == ["messages"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in chat["properties"]["temperature"]["anyOf"]
    assert chat["properties"]["messages"]["minItems"] == 1
    assert document["components"]["schemas"]["CompletionRequest"]["required"] == ["prompt"]
    assert document["components"]["schemas"]["MessagesRequest"]["required"] == ["messages", "max_tokens"]


def test_every_refusal_has_a_schema(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                schemas = [content["schema"] for content in response["content"].values()]
                assert schemas, (path, status)
                if status in ("429", "503"):
                    assert "Retry-After" in response["headers"]
                if path.startswith("/v1/messages") and status != "200":
                    assert schemas == [{"$ref": "#/components/schemas/AnthropicError"}]


def test_the_page_tells_of_all_that_is_described_and_needs_nothing_else(document: dict[str, Any]) -> None:
    page = page_of(document)
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page
    for name, schema in document["components"]["schemas"].items():
        assert f'id="{name}"' in page
        assert all(f"<code>{field}</code>" in page for field in schema.get("properties", {}))
    assert "number from 0 to 2 or null" in page
    assert not re.search("<script|src=|http://|https://|@import", page)
    assert "&lt;" in page_of({**document, "info": {**document["info"], "title": "<b>"}})


def test_every_type_goes_by_its_own_name(document: dict[str, Any]) -> None:
    assert not [name for name in document["components"]["schemas"] if not name.isidentifier()]
