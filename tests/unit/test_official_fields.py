"""Every field of the official clients' requests is honoured, refused by name or ignored on purpose."""

from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from msgspec import Struct
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from services.gateway.api.messages_request import CountTokensRequest, MessagesRequest
from services.gateway.api.refusals import CHAT_AND_COMPLETIONS, MESSAGES, RESPONSES, Others
from services.gateway.api.responses_request import ResponsesRequest
from services.gateway.api.schema import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("official", "schema", "others"),
    [
        (chat_create_params.CompletionCreateParamsStreaming, ChatRequest, CHAT_AND_COMPLETIONS),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest, CHAT_AND_COMPLETIONS),
        (response_create_params.ResponseCreateParamsStreaming, ResponsesRequest, RESPONSES),
        (message_create_params.MessageCreateParamsStreaming, MessagesRequest, MESSAGES),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest, MESSAGES),
    ],
)
def test_what_becomes_of_each_is_decided(official: Any, schema: type[Struct], others: Others) -> None:
    fields = {name for kind in official.__mro__ for name in getattr(kind, "__annotations__", {})}
    assert {"model", "tools"} & fields
    assert fields <= {*schema.__struct_fields__, *others.refused, *others.ignored}
