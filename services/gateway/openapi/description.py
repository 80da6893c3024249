"""The description of the HTTP interface: OpenAPI 3.1, made of the very types that requests are checked with. Pure.

Served by ``services.gateway.api.describe``. What types cannot say of a request is added here.
"""

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from services.gateway.api.messages_request import CountTokensRequest, MessagesRequest, Thinking
from services.gateway.api.responses_request import ResponsesRequest
from services.gateway.api.schema import ChatRequest, CompletionRequest, NumLogprobs
from services.gateway.api.tokenize import TokenizeRequest
from services.gateway.openapi import answers, anthropic_answers
from services.gateway.openapi.inputs import (
    ANTHROPIC_MESSAGES,
    CHAT_MESSAGES,
    PROMPTS,
    RESPONSE_ITEMS,
    TOOL_CHOICE,
    TOOLS,
)
from services.gateway.openapi.operations import OPERATIONS, REFUSALS, Operation

REF = "#/components/schemas/{name}"
SECURITY: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
RETRY_AFTER: dict[str, Any] = {
    "Retry-After": {"description": "Seconds until it is worth trying again.", "schema": {"type": "integer"}}
}
REQUEST_ID: dict[str, Any] = {
    "X-Request-Id": {"description": "The client's own, or made up.", "schema": {"type": "string"}}
}
NOT_READY = ("/ready", 503)
"""The one refusal that is no error: it says why."""


def describe(*, needs_key: bool) -> dict[str, Any]:
    """The whole document; ``needs_key``: whether keys are asked for."""
    types = _types_of(OPERATIONS)
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    _describe_by_hand(components, dict(zip(types, schemas, strict=True)))
    for component in components.values():
        component["description"] = component["description"].replace("``", "`")
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, needs_key=needs_key)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paternoster",
            "version": version("paternoster"),
            "description": "Text from a language model. A field that is null is as one that is absent; unknown fields "
            "are ignored; fields that would change the answer and are not built are refused by name.",
        },
        "security": [{name: []} for name in SECURITY] if needs_key else [],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": SECURITY},
    }


def _types_of(operations: Sequence[Operation]) -> list[Any]:
    types: dict[Any, None] = {answers.Error: None, anthropic_answers.AnthropicError: None}
    for operation in operations:
        for kind in (operation.request, operation.answer, operation.chunk, operation.anthropic):
            if isinstance(kind, type):
                types[kind] = None
    return [*types, *PROMPTS, *CHAT_MESSAGES, *ANTHROPIC_MESSAGES, *RESPONSE_ITEMS, TOOLS, TOOL_CHOICE, NumLogprobs]


def _describe_by_hand(components: dict[str, Any], schema_of: dict[Any, Any]) -> None:
    """Fields that are checked by hand, or against each other."""

    def one_of(kinds: Sequence[Any]) -> dict[str, Any]:
        return {"anyOf": [schema_of[kind] for kind in kinds]}

    def list_of(kinds: Sequence[Any]) -> dict[str, Any]:
        return {"type": "array", "items": one_of(kinds), "minItems": 1}

    fields = (
        (ChatRequest, "messages", list_of(CHAT_MESSAGES)),
        (ChatRequest, "tools", schema_of[TOOLS]),
        (ChatRequest, "tool_choice", schema_of[TOOL_CHOICE]),
        (CompletionRequest, "prompt", one_of(PROMPTS)),
        (CompletionRequest, "logprobs", {"anyOf": [schema_of[NumLogprobs], {"const": False}, {"type": "null"}]}),
        (Thinking, "type", {"enum": ["adaptive", "disabled"]}),
        (MessagesRequest, "messages", list_of(ANTHROPIC_MESSAGES)),
        (CountTokensRequest, "messages", list_of(ANTHROPIC_MESSAGES)),
        (ResponsesRequest, "input", {"anyOf": [{"type": "string"}, list_of(RESPONSE_ITEMS)]}),
        (TokenizeRequest, "messages", {"anyOf": [list_of(CHAT_MESSAGES), {"type": "null"}]}),
        (TokenizeRequest, "tools", schema_of[TOOLS]),
    )
    for request, name, schema in fields:
        components[request.__name__]["properties"][name] = schema
    components[ChatRequest.__name__]["required"] = ["messages"]
    components[CompletionRequest.__name__]["required"] = ["prompt"]
    absent = {"type": "null"}
    components[TokenizeRequest.__name__]["oneOf"] = [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": absent}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": absent}},
    ]


def _operation(operation: Operation, *, needs_key: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{re.sub('[^a-z]+', '_', operation.path)}".rstrip("_"),
        "responses": {"200": _success(operation)},
    }
    if operation.is_open and needs_key:
        described["security"] = []
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    if operation.request is not None:
        content = {"application/json": {"schema": _reference(operation.request)}}
        described["requestBody"] = {"required": True, "content": content}
    for status in operation.refusals:
        described["responses"][str(status)] = _refusal(operation, status)
    return described


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    parameters = []
    if "{model}" in operation.path:
        schema: dict[str, Any] = {"type": "string", "minLength": 1}
        parameters.append({"name": "model", "in": "path", "required": True, "schema": schema})
    if operation.anthropic is not None:
        told = "With it the answer has Anthropic's shape."
        schema = {"type": "string"}
        parameters.append({"name": "anthropic-version", "in": "header", "description": told, "schema": schema})
    return parameters


def _success(operation: Operation) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        schema: dict[str, Any] = {"type": "object" if operation.answer == "application/json" else "string"}
        content = {operation.answer: {"schema": schema}}
    else:
        content = {"application/json": {"schema": _reference(operation.answer, operation.anthropic)}}
    description = operation.summary
    if operation.stream:
        content["text/event-stream"] = {"schema": _event(operation)}
        description = "In one piece, or as events if `stream` is true."
    return {"description": description, "headers": REQUEST_ID, "content": content}


def _event(operation: Operation) -> dict[str, Any]:
    """One event of a stream: its fields as they come over the wire. The data of all but the last is JSON."""
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}
    properties = {"data": data}
    if operation.chunk is not None:
        data["contentSchema"] = _reference(operation.chunk)
        properties["data"] = {"anyOf": [data, {"const": "[DONE]"}]}
    if operation.event_names:
        properties["event"] = {"enum": list(operation.event_names)}
    return {"type": "object", "description": operation.stream, "properties": properties, "required": [*properties]}


def _refusal(operation: Operation, status: int) -> dict[str, Any]:
    shape = answers.Status if (operation.path, status) == NOT_READY else operation.error
    headers = {**REQUEST_ID, **RETRY_AFTER} if status in (429, 503) else REQUEST_ID
    other = anthropic_answers.AnthropicError if operation.anthropic is not None else None
    content = {"application/json": {"schema": _reference(shape, other)}}
    description = operation.not_found if status == 404 else REFUSALS[status]
    return {"description": description, "headers": headers, "content": content}


def _reference(kind: type[Any], other: type[Any] | None = None) -> dict[str, Any]:
    if other is not None:
        return {"anyOf": [_reference(kind), _reference(other)]}
    return {"$ref": REF.format(name=kind.__name__)}
