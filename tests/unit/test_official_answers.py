"""Answers have every field of the official clients' types, but those that docs/api.md names.

That they are as ``openapi.answers`` says is shown by ``tests/integration/test_gateway_openapi.py``.
"""

import re
from pathlib import Path
from typing import Any

from anthropic import types as anthropic
from msgspec import Struct
from openai import types as openai
from openai.types import chat, responses
from openai.types.chat import chat_completion, chat_completion_chunk

from services.gateway.openapi import answers, anthropic_answers

API = Path(__file__).parents[2] / "docs" / "api.md"
OFFICIAL: dict[str, list[tuple[tuple[Any, ...], type[Struct]]]] = {
    "Chat and completions": [
        ((chat.ChatCompletion,), answers.ChatCompletion),
        ((chat_completion.Choice,), answers.ChatChoice),
        ((chat.ChatCompletionMessage,), answers.AssistantMessage),
        ((chat.ChatCompletionChunk,), answers.ChatCompletionChunk),
        ((chat_completion_chunk.Choice,), answers.ChatChunkChoice),
        ((chat_completion_chunk.ChoiceDelta,), answers.ChatDelta),
        ((chat_completion_chunk.ChoiceDeltaToolCall,), answers.ToolCall),
        ((chat.ChatCompletionTokenLogprob,), answers.TokenLogprob),
        ((openai.Completion,), answers.Completion),
        ((openai.CompletionChoice,), answers.CompletionChoice),
        ((openai.CompletionUsage,), answers.Usage),
    ],
    "Models": [((openai.Model,), answers.Model), ((anthropic.ModelInfo,), anthropic_answers.AnthropicModel)],
    "Responses": [
        ((responses.Response,), answers.Response),
        ((responses.ResponseUsage,), answers.ResponsesUsage),
        (
            (responses.ResponseOutputMessage, responses.ResponseReasoningItem, responses.ResponseFunctionToolCall),
            answers.ResponseItem,
        ),
    ],
    "Messages": [
        ((anthropic.Message,), anthropic_answers.Message),
        ((anthropic.Usage,), anthropic_answers.MessageUsage),
        ((anthropic.TextBlock, anthropic.ThinkingBlock, anthropic.ToolUseBlock), anthropic_answers.ContentBlock),
        ((anthropic.MessageTokensCount,), anthropic_answers.TokenCount),
    ],
}


def named_in_the_docs() -> dict[str, set[str]]:
    section = API.read_text().split("## What answers leave out")[1].split("\n## ")[0]
    items = [item.partition(":") for item in section.split("\n- ")[1:]]
    return {name: set(re.findall(r"`(\w+)`", fields)) for name, _, fields in items}


def test_what_answers_leave_out_is_written_down() -> None:
    left_out: dict[str, set[str]] = {name: set() for name in OFFICIAL}
    for name, pairs in OFFICIAL.items():
        for official, ours in pairs:
            fields = {field.alias or key for kind in official for key, field in kind.model_fields.items()}
            left_out[name] |= fields - set(ours.__struct_fields__)
    assert left_out == named_in_the_docs()
