"""JSON to checked structs, and the requests of ``/v1/chat/completions`` and ``/v1/completions``.

Every number is bounded here, once. Unknown fields are ignored and logged once per name; what would change the output
and cannot be honoured is refused by name (``services.gateway.api.refusals``). Called by the endpoints; pure.
"""

import functools
import logging
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from services.gateway.api.constraints import ConstrainedRequest
from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.json_bounds import check_body
from services.gateway.api.refusals import CHAT_AND_COMPLETIONS, Others, refuse_unsupported

_log = logging.getLogger(__name__)

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_BIASES = 1024

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(Struct):
    """``stream_options``; null means the default."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(ConstrainedRequest, kw_only=True):
    """What both endpoints share. A field that is null is as one that is absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    deadline_ms: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Any = None
    """A string, token ids, or a list of either; see ``services.gateway.api.prompts``."""
    logprobs: NumLogprobs | bool | None = None
    echo: bool | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Any = None
    max_completion_tokens: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Any = None
    """With ``tool_choice`` see ``services.gateway.api.tools``."""
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


Schema = TypeVar("Schema", bound=Struct)


class UnknownFields:
    """Names of ignored fields, each logged once; a client cannot make it grow without end."""

    MAX_NAMES = 200
    MAX_CHARS = 60

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, name: str) -> None:
        """Log ``name`` unless it was before, or too many others were."""
        name = name[: self.MAX_CHARS]
        if name not in self._seen and len(self._seen) < self.MAX_NAMES:
            self._seen.add(name)
            _log.info("ignoring the unknown request field %r", name)


unknown_fields = UnknownFields()


def parse(body: bytes, schema: type[Schema], others: Others = CHAT_AND_COMPLETIONS) -> Schema:
    """Read a request body. Raises ApiError (400) that names the field at fault."""
    return checked(_json_object(body), schema, others)


def checked(plain: dict[str, Any], schema: type[Schema], others: Others = CHAT_AND_COMPLETIONS) -> Schema:
    """A request of its fields. Raises ApiError (400) that names the one at fault."""
    try:
        request = msgspec.convert(plain, schema)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    further = {name: plain[name] for name in plain.keys() - _names_of(schema)}
    refuse_unsupported(further, others.refused)
    for name in further.keys() - others.refused.keys() - others.ignored:
        unknown_fields.note(name)
    if isinstance(request, GenerationRequest) and request.stream_options is not None and not request.stream:
        raise invalid("stream_options is only allowed with stream set to true", "stream_options")
    return request


@functools.cache
def _names_of(schema: type[Struct]) -> frozenset[str]:
    """Of its fields."""
    return frozenset(schema.__struct_fields__)


def is_json(text: str) -> bool:
    """Whether it is one JSON value."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _json_object(body: bytes) -> dict[str, Any]:
    check_body(body)
    try:
        plain = msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        detail = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"the request body is not valid JSON: {detail}", code="invalid_json") from None
    if not isinstance(plain, dict):
        raise invalid("the request body must be a JSON object", code="invalid_json")
    return plain


def _invalid_field(detail: str) -> ApiError:
    """msgspec ends its messages with the place: ``Expected `int`, got `str` - at `$.n```."""
    message, _, place = detail.partition(" - at `$.")
    path = place.rstrip("`")
    if not path:
        missing = re.fullmatch("Object missing required field `(.*)`", detail)
        return invalid(f"{missing[1]} is missing", missing[1]) if missing is not None else invalid(detail)
    return invalid(f"{path}: {message}", re.split(r"[.\[]", path)[0])
