"""Messages of the gateway link."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.wire.facts import ModelFacts
from shared.wire.logprobs import Logprobs
from shared.wire.sampling import Sampling
from shared.wire.session import PROTOCOL, Goodbye, Heartbeat, Refused, Rehello

FinishReason = Literal["stop", "length", "error", "cancelled", "deadline"]
"""``stop``: a stop token; ``length``: max_tokens, the context or the pool is full; ``error``: see ``Delta.error``;
``deadline``: an error too, the request's ``deadline_ms`` has passed;
``cancelled``: the gateway asked for it. A terminal delta after a Cancel is sent all the same, so that every Submit ends
in exactly one terminal message."""

RejectCode = Literal["invalid", "too_long", "queue_full", "overloaded", "unavailable", "duplicate", "rate_limited"]
"""``queue_full``: a limit on what waits; ``overloaded``: the first token would come too late; ``rate_limited``: one of
the ``TenantLimits``."""
NonNegative = Annotated[int, Meta(ge=0)]
Bounded = Annotated[int, Meta(ge=0, lt=2**62)]
Limit = Annotated[int, Meta(ge=0, lt=2**31)]


class GatewayHello(Struct, frozen=True, array_like=True, tag="gateway_hello"):
    """gateway -> scheduler: opens a session."""

    name: str
    pid: int
    protocol: int = PROTOCOL


class TenantLimits(Struct, frozen=True, array_like=True):
    """What a tenant may ask for. It comes with each of its submits; the scheduler counts, over all gateways."""

    weight: Annotated[float, Meta(ge=0.001, le=1000)] | None = None
    """Its share, if the scheduler has no other for it; None is 1."""
    requests_per_minute: Limit = 0
    """0 is no limit; so below."""
    tokens_per_minute: Limit = 0
    """Of prompts and outputs."""
    concurrency: Limit = 0
    """Requests that wait or run at once."""


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """gateway -> scheduler: one request (one choice of one prompt)."""

    request_id: str
    """Unique among the gateway's live requests; made by the gateway, never by a client."""
    prompt: bytes
    """Column of token ids, at least one."""
    sampling: Sampling
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    """Output tokens, ``output`` included; cut by the scheduler to what context and pools allow."""
    output: bytes = b""
    """Column: what was generated before. Not empty only when a live stream is submitted again."""
    stop_token_ids: bytes = b""
    """Column: extra ids that end the request (EOS ids are added by the scheduler unless ``ignore_eos``)."""
    ignore_eos: bool = False
    priority: int = 0
    """Lower runs first."""
    tenant: str = ""
    salt: str = ""
    deadline_ms: Bounded = 0
    """Milliseconds from now within which the request must end; 0 is none."""
    trace: str = ""
    """W3C traceparent, or empty."""
    resubmitted: bool = False
    """It was accepted in an earlier session (with or without output since): no queue limit refuses it."""
    group: str = ""
    """Name shared by the choices of one prompt, unique among the gateway's; the prompt is computed once for all."""
    limits: TenantLimits | None = None
    """Those of the tenant; None is none."""


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """gateway -> scheduler: stop this request. Unknown or finished ids, and repeats, are harmless."""

    request_id: str
    why: str = ""


class StateQuery(Struct, frozen=True, array_like=True, tag="state_query"):
    """gateway -> scheduler: asks for a ``StateReply`` with the same ``query_id``."""

    query_id: int


class GatewayWelcome(Struct, frozen=True, array_like=True, tag="gateway_welcome"):
    """scheduler -> gateway: the session is open. ``epoch`` tells one scheduler process from the next."""

    epoch: int
    ready: bool
    reason: str = ""
    facts: ModelFacts | None = None
    max_prompt_tokens: int = 0
    """Longest prompt the largest pool could hold now; 0 while unknown."""


class Availability(Struct, frozen=True, array_like=True, tag="availability"):
    """scheduler -> gateway: whether requests can be served has changed. ``reason`` says why not."""

    ready: bool
    reason: str = ""
    facts: ModelFacts | None = None
    max_prompt_tokens: int = 0


class Accepted(Struct, frozen=True, array_like=True, tag="accepted"):
    """scheduler -> gateway: the request is in the queue; it will end in a terminal delta."""

    request_id: str


class Rejected(Struct, frozen=True, array_like=True, tag="rejected"):
    """scheduler -> gateway: terminal; the request never entered the queue."""

    request_id: str
    code: RejectCode
    detail: str
    retry_after_ms: NonNegative = 0


class Usage(Struct, frozen=True, array_like=True):
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Delta(Struct, frozen=True, array_like=True):
    """What one request got since its last delta. ``finish`` makes it terminal.

    ``usage`` is present then, and with the first tokens of a request that found some of its prompt in the prefix cache:
    a gateway that ends it by itself (at a stop string) knows of them too.
    """

    request_id: str
    token_ids: bytes
    """Column: new output tokens (the stop token included)."""
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: str = ""
    stop_token_id: int = -1
    """The stop token that ended it, when ``finish`` is ``stop``; it is the last of the token ids."""
    logprobs: Logprobs | None = None
    """Where the request's ``Sampling`` asks for them."""


class Tokens(Struct, frozen=True, array_like=True, tag="tokens"):
    """scheduler -> gateway: all that one step brought for this gateway's requests."""

    items: list[Delta]


class StateReply(Struct, frozen=True, array_like=True, tag="state_reply"):
    """scheduler -> gateway: the ``scheduler`` part of ``/debug/state`` as JSON text."""

    query_id: int
    state_json: str


ToScheduler = GatewayHello | Submit | Cancel | StateQuery | Heartbeat | Goodbye
ToGateway = GatewayWelcome | Refused | Rehello | Availability | Accepted | Rejected | Tokens | StateReply | Heartbeat
