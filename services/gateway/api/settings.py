"""From a parsed request and the model's facts to what every choice of it is generated with.

All the choices where servers differ (docs/api.md) are made here: what counts as greedy, what is off, what is cut to
the context and what is refused. Called by the endpoints; pure.
"""

import hashlib
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.constraints import Asked, constraint_of
from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.prompts import check_token_ids
from services.gateway.api.schema import MAX_LOGPROBS, ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.api.tenant import NOBODY, Tenant
from shared.wire import tokens
from shared.wire.facts import ModelFacts
from shared.wire.gateway import Submit
from shared.wire.sampling import NO_LOGPROBS, Sampling

GREEDY_BELOW = 1e-5
COMPLETION_MAX_TOKENS = 16
"""Of /v1/completions, when the request does not say: OpenAI's default."""
SEED_MASK = 2**63 - 1
NEVER = -1e9
"""Bias of a token that must not come while there is another one."""


class Settings(Struct, frozen=True):
    """What all choices of one request share."""

    n: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_tokens: int | None
    """As asked for; None is up to the context."""
    min_tokens: int
    stops: tuple[str, ...]
    include_stop: bool
    stop_token_ids: tuple[int, ...]
    masked_ids: bytes
    """Column: ids that may not be sampled before ``min_tokens``."""
    ignore_eos: bool
    skip_special_tokens: bool
    return_token_ids: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    deadline_ms: int
    tenant: Tenant
    salt: str
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: bytes
    bias_values: bytes
    """Columns, see ``Sampling``."""
    num_logprobs: int
    """-1 is none."""
    echo: bool
    constraint: Asked | None = None
    """What the output must be, if the request asks for anything."""

    @property
    def prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are asked for."""
        return self.echo and self.num_logprobs >= 0

    @property
    def prompt_only(self) -> bool:
        """Whether no output is asked for; one token is computed all the same, and nobody sees it."""
        return self.max_tokens == 0

    def constrained(self, asked: Asked, facts: ModelFacts) -> "Settings":
        """The same with a constraint, in place of the one there is."""
        if not self.ignore_eos:
            return replace(self, constraint=asked)
        # It still ends where nothing more may follow; nowhere else.
        bias = dict(zip(tokens.unpack(self.bias_ids), tokens.unpack_floats(self.bias_values), strict=True))
        bias |= dict.fromkeys(facts.eos_token_ids, NEVER)
        ids, values = tokens.pack(bias), tokens.pack_floats(bias.values())
        return replace(self, constraint=asked, ignore_eos=False, bias_ids=ids, bias_values=values)

    def submit(self, request_id: str, prompt: Sequence[int], choice: int, facts: ModelFacts, group: str = "") -> Submit:
        """The wire message of one choice of one prompt; ``group`` is shared by all choices of the prompt.

        Raises ApiError (400) for a prompt that leaves no room.
        """
        room = facts.context_len - len(prompt)
        if room <= 0:
            raise prompt_too_long(len(prompt), facts)
        max_tokens = room if self.max_tokens is None else min(room, max(1, self.max_tokens))
        min_tokens = min(self.min_tokens, max_tokens)
        sampling = Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=choice_seed(self.seed, choice),
            min_tokens=min_tokens,
            stop_token_ids=self.masked_ids if min_tokens else b"",
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            bias_ids=self.bias_ids,
            bias_values=self.bias_values,
            num_logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            constraint=None if self.constraint is None else self.constraint.constraint,
        )
        return Submit(
            request_id=request_id,
            prompt=tokens.pack(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_token_ids=tokens.pack(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            tenant=self.tenant.name,
            salt=self.salt,
            deadline_ms=self.deadline_ms,
            group=group,
            limits=self.tenant.limits,
        )


def settings_of(request: GenerationRequest, facts: ModelFacts, fallback_seed: int, tenant: Tenant = NOBODY) -> Settings:
    """Normalise a request of ``tenant``. ``fallback_seed`` is for one that brings none. Raises ApiError (400)."""
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_token_ids, facts.vocab_size, "stop_token_ids")
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    greedy = temperature < GREEDY_BELOW or top_p == 0
    top_k = request.top_k or 0
    seed = fallback_seed if request.seed is None or request.seed == -1 else request.seed & SEED_MASK
    max_tokens, min_tokens = _token_limits(request)
    bias = _bias(request, facts)
    constraint = constraint_of(request)
    stream_options = request.stream_options
    settings = Settings(
        n=request.n or 1,
        seed=seed,
        temperature=0.0 if greedy else temperature,
        top_k=top_k if 0 < top_k < facts.vocab_size else 0,
        top_p=top_p or 1.0,
        min_p=request.min_p or 0.0,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stops=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        include_stop=bool(request.include_stop_str_in_output),
        stop_token_ids=stop_token_ids,
        masked_ids=tokens.pack(sorted({*facts.eos_token_ids, *stop_token_ids})),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        return_token_ids=bool(request.return_token_ids),
        stream=bool(request.stream),
        include_usage=stream_options is not None and bool(stream_options.include_usage),
        continuous_usage=stream_options is not None and bool(stream_options.continuous_usage_stats),
        priority=request.priority or 0,
        deadline_ms=request.deadline_ms or 0,
        tenant=tenant,
        salt=request.cache_salt or "",
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        bias_ids=tokens.pack(bias),
        bias_values=tokens.pack_floats(bias.values()),
        num_logprobs=min(_num_logprobs(request), facts.vocab_size),
        echo=isinstance(request, CompletionRequest) and bool(request.echo),
    )
    return settings if constraint is None else settings.constrained(constraint, facts)


def _num_logprobs(request: GenerationRequest) -> int:
    """How many of the most likely tokens to tell besides the chosen one; NO_LOGPROBS when not even that is wanted."""
    if isinstance(request, ChatRequest):
        if request.logprobs:
            return request.top_logprobs or 0
        if request.top_logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    elif isinstance(request, CompletionRequest):
        if request.logprobs is True:
            raise invalid(f"logprobs must be a number from 0 to {MAX_LOGPROBS}", "logprobs")
        if request.logprobs is not None and request.logprobs is not False:
            return request.logprobs
    return NO_LOGPROBS


def _bias(request: GenerationRequest, facts: ModelFacts) -> dict[int, float]:
    """Token ids and what is added to their logits."""
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("the keys of logit_bias must be token ids", "logit_bias")
        bias[int(key)] = value
    check_token_ids(list(bias), facts.vocab_size, "logit_bias")
    return {token_id: bias[token_id] for token_id in sorted(bias)}


def _token_limits(request: GenerationRequest) -> tuple[int | None, int]:
    """max_tokens (None: up to the context) and min_tokens."""
    name, max_tokens = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            name, max_tokens = "max_completion_tokens", request.max_completion_tokens
    elif max_tokens is None:
        max_tokens = COMPLETION_MAX_TOKENS
    if max_tokens == 0 and not _wants_prompt_logprobs(request):
        raise invalid(f"{name} must be at least 1, unless echo asks for logprobs of the prompt", name)
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"min_tokens ({min_tokens}) must not be above {name} ({max_tokens})", "min_tokens")
    return max_tokens, min_tokens


def _wants_prompt_logprobs(request: GenerationRequest) -> bool:
    return isinstance(request, CompletionRequest) and bool(request.echo) and _num_logprobs(request) >= 0


def prompt_too_long(num_tokens: int | str, facts: ModelFacts) -> ApiError:
    """400: the prompt leaves no room in the context; names both numbers."""
    return invalid(
        f"the prompt has {num_tokens} tokens, but the model's context length is {facts.context_len} tokens "
        "and at least one must be left for the answer",
        code="context_length_exceeded",
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of several choices; the first is what a request for one choice gets."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MASK
