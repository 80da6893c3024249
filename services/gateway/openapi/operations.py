"""Every route as the description tells of it: what it takes, what it answers, and how it can fail. Pure data."""

from dataclasses import dataclass
from typing import Any, Literal

from services.gateway.api.errors import ANTHROPIC_ROUTES
from services.gateway.api.messages_request import CountTokensRequest, MessagesRequest
from services.gateway.api.responses_request import ResponsesRequest
from services.gateway.api.schema import ChatRequest, CompletionRequest
from services.gateway.api.tokenize import DetokenizeRequest, TokenizeRequest
from services.gateway.openapi import answers, anthropic_answers

REFUSALS = {
    400: "The request is wrong; nothing of it has reached an executor.",
    401: "No valid API key.",
    413: "The body is larger than 8 MiB.",
    429: "Too much waits, the first token would come too late, or the key is above one of its limits.",
    500: "The request failed in an executor or in the gateway.",
    503: "Not ready, shutting down, or nothing could serve the request.",
    504: "The request's deadline has passed.",
}
READING = (400, 401, 404, 413, 500, 503)
"""How a request with a body can fail that no executor sees."""
GENERATING = (400, 401, 404, 413, 429, 500, 503, 504)


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: Literal["get", "post"]
    path: str
    summary: str
    answer: Any
    """Type of the answer in one piece; a media type where it is no JSON."""
    refusals: tuple[int, ...]
    request: type[Any] | None = None
    stream: str = ""
    """What its stream is, if it has one."""
    chunk: type[Any] | None = None
    """Type of the data of its events, where all are alike."""
    event_names: tuple[str, ...] = ()
    """Of its events, where they have names."""
    not_found: str = "No such model."
    """What 404 means."""
    is_open: bool = False
    """Whether it needs no key."""
    anthropic: type[Any] | None = None
    """Type of the answer to Anthropic's clients, where that is another: then their errors are other ones, too."""

    @property
    def error(self) -> type[Any]:
        """The shape of its errors."""
        return anthropic_answers.AnthropicError if self.path.startswith(ANTHROPIC_ROUTES) else answers.Error


_CHUNKS = (
    "Server-sent events; the data of the last is `[DONE]`. With `stream_options.include_usage` the chunk before it has "
    "no choices, and the usage. A failure is one event with an `error`, then `[DONE]`. Lines that begin with a colon "
    "show that the connection lives."
)
_RESPONSES = (
    "Server-sent events with names, numbered by `sequence_number`. Each item of output is added, its content or "
    "arguments grow by deltas, and it is done. The last event is `response.completed`, `response.incomplete` or, "
    "behind an `error`, `response.failed`. Lines that begin with a colon show that the connection lives."
)
_RESPONSES_EVENTS = (
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "error",
)
_MESSAGES = (
    "Server-sent events with names. Each block of content starts, grows by deltas and stops; `message_delta` brings "
    "the stop reason and the usage. The last is `message_stop`, or `error`; `ping` shows that the connection lives."
)
_MESSAGES_EVENTS = (
    "message_start",
    "ping",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "error",
)

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        answers.ChatCompletion,
        GENERATING,
        ChatRequest,
        _CHUNKS,
        answers.ChatCompletionChunk,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue prompts",
        answers.Completion,
        GENERATING,
        CompletionRequest,
        _CHUNKS,
        answers.Completion,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer, as OpenAI's Responses API; nothing is stored",
        answers.Response,
        GENERATING,
        ResponsesRequest,
        _RESPONSES,
        event_names=_RESPONSES_EVENTS,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, as Anthropic's Messages API",
        anthropic_answers.Message,
        GENERATING,
        MessagesRequest,
        _MESSAGES,
        event_names=_MESSAGES_EVENTS,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation's prompt",
        anthropic_answers.TokenCount,
        READING,
        CountTokensRequest,
    ),
    Operation(
        "post",
        "/tokenize",
        "Text or messages to token ids",
        answers.Tokenized,
        (400, 401, 404, 413, 429, 500, 503),
        TokenizeRequest,
    ),
    Operation("post", "/detokenize", "Token ids to text", answers.Detokenized, READING, DetokenizeRequest),
    Operation(
        "get",
        "/v1/models",
        "The models that are served: one",
        answers.ModelList,
        (401, 500, 503),
        anthropic=anthropic_answers.AnthropicModelList,
    ),
    Operation(
        "get",
        "/v1/models/{model}",
        "The model by its name",
        answers.Model,
        (401, 404, 500, 503),
        anthropic=anthropic_answers.AnthropicModel,
    ),
    Operation("get", "/health", "200 while the process lives", answers.Status, (500,), is_open=True),
    Operation("get", "/ready", "200 once requests can be served", answers.Status, (500, 503), is_open=True),
    Operation("get", "/metrics", "Metrics for Prometheus", "text/plain", (401, 500)),
    Operation(
        "get",
        "/debug/state",
        "What is held, if the operator allows it",
        answers.State,
        (401, 404, 500, 503),
        not_found="The operator does not allow it.",
    ),
    Operation("get", "/openapi.json", "This description", "application/json", (401, 500, 503)),
    Operation("get", "/docs", "This description, as a page", "text/html", (401, 500, 503)),
)
