"""What a shape is told of an answer, without a gateway."""

import dataclasses
from typing import Any

from services.gateway.api.schema import ChatRequest
from services.gateway.api.settings import Settings, settings_of
from services.gateway.choice import Choice
from services.gateway.shapes.shape import Outline
from services.gateway.usage import Usage
from shared import fake_model


def outline(**fields: Any) -> Outline:
    """Of an answer to the prompt [1, 2] by a model whose tokens are spelled as their numbers; ``Settings``' fields."""
    settings: Settings = dataclasses.replace(settings_of(ChatRequest(), fake_model.facts(), 1), **fields)
    no_choices: list[Choice] = []
    usage = Usage([[1, 2]], no_choices, settings.n)
    return Outline("id-1", 7, "m", settings, [[1, 2]], usage, lambda token_id: str(token_id).encode())
