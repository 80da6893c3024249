"""What the endpoints answer, as types: only described and checked by tests, as answers are written by hand for speed.

A field with a default may be absent. Pure data.
"""

from typing import Any, Literal

from msgspec import Struct


class ErrorDetail(Struct):
    """What is wrong. ``param`` names the field at fault, ``code`` tells errors of one status apart."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """Any answer that is no success, in OpenAI's shape."""

    error: ErrorDetail


class PromptTokensDetails(Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Of the answer's tokens; absent where the model did not think."""

    reasoning_tokens: int


class Usage(Struct):
    """Token counts, summed over prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(Struct):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Logprobs of a chat's choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Struct):
    """A function and the JSON text of its arguments; in a stream a piece of that, and the name once."""

    arguments: str
    name: str | None = None


class ToolCall(Struct):
    """A call of a function; in a stream the id and the type come once."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    """Which call of the message it is; only in a stream."""


class AssistantMessage(Struct):
    """What the model says. The content is null where it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Struct):
    """One choice of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(Struct):
    """A chat answered in one piece."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class ChatDelta(Struct):
    """What a choice got since the chunk before."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(Struct):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Struct):
    """The data of one event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Struct):
    """Logprobs of a completion's choice: lists of one length."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    """One choice of a completion, or its part of a chunk: then the finish reason is null until its end."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Struct):
    """Text, in one piece or as the data of one event of a stream: then usage may be null or absent."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ResponsesUsage(Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseItem(Struct):
    """An item of output: a message, reasoning or a function call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[dict[str, Any]] | None = None
    role: Literal["assistant"] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class Response(Struct):
    """A response; in events of a stream as far as it has come."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    """Null unless it is completed."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponsesUsage | None


class Tokenized(Struct):
    """A text as token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct):
    """Token ids as text."""

    prompt: str


class Model(Struct):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    """Null until an executor has told it."""


class ModelList(Struct):
    """All models: one."""

    object: Literal["list"]
    data: list[Model]


class Status(Struct):
    """Life or readiness."""

    status: str
    reason: str | None = None


class State(Struct):
    """What the gateway and the scheduler hold."""

    gateway: dict[str, Any]
    scheduler: dict[str, Any]
