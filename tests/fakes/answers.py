"""What a shape is told of an answer, without a gateway; and events with names, read back."""

import json
from typing import Any

import msgspec

from services.gateway.api.schema import ChatRequest
from services.gateway.api.settings import Settings, settings_of
from services.gateway.choice import Choice
from services.gateway.shapes.shape import Outline
from services.gateway.usage import Usage
from shared import fake_model


def outline(**fields: Any) -> Outline:
    """Of an answer to the prompt [1, 2] by a model whose tokens are spelled as their numbers; ``Settings``' fields."""
    settings: Settings = msgspec.structs.replace(settings_of(ChatRequest(), fake_model.facts(), 1), **fields)
    no_choices: list[Choice] = []
    usage = Usage([[1, 2]], no_choices, settings.n)
    return Outline("id-1", 7, "m", settings, [[1, 2]], usage, lambda token_id: str(token_id).encode())


def named_events(body: str) -> list[tuple[str, Any]]:
    """Name and data of each event of a stream with ``event:`` lines; comments are left out."""
    assert body.endswith("\n\n"), body[-50:]
    read = []
    for part in body[:-2].split("\n\n"):
        if part.startswith(":"):
            continue
        name, data = part.split("\n")
        assert name.startswith("event: "), part
        assert data.startswith("data: "), part
        read.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert read[-1][1]["type"] == read[-1][0]
    return read
