"""``POST /v1/completions``."""

from collections.abc import Sequence

from starlette.requests import Request

from services.gateway.api.answer import Answer
from services.gateway.api.endpoint import gateway_of, tenant_of
from services.gateway.api.errors import invalid
from services.gateway.api.note import note_of
from services.gateway.api.prompts import Prompt, check_token_ids, prompts_of
from services.gateway.api.schema import CompletionRequest, parse
from services.gateway.api.settings import prompt_too_long, settings_of
from services.gateway.gateway import Gateway
from services.gateway.shapes.chunks import CompletionChunks
from services.gateway.text.echo import Echo, echo_of
from services.gateway.text.tokenizer import TooLong
from shared.wire.facts import ModelFacts


async def completions(request: Request) -> Answer:
    """Continue each prompt."""
    gateway = gateway_of(request)
    body = await request.body()
    fields = parse(body, CompletionRequest)
    gateway.check_model(fields.model)
    facts = gateway.facts()
    settings = settings_of(fields, facts, gateway.new_seed(), tenant_of(request))
    if settings.constraint is not None:
        asked = await gateway.constraints.in_lark(settings.constraint, facts)
        await gateway.constraints.check(asked, facts)
        settings = settings.constrained(asked, facts)
    prompts = await _encoded(gateway, fields, facts, len(body))
    echoes = await _echoes(gateway, prompts, skip_special=settings.skip_special_tokens) if settings.echo else None
    answer_id = "cmpl-" + note_of(request.scope).id
    return Answer(gateway, settings, prompts, facts, CompletionChunks, answer_id, echoes)


async def _echoes(gateway: Gateway, prompts: Sequence[list[int]], *, skip_special: bool) -> list[Echo]:
    def decode() -> list[Echo]:
        return [echo_of(gateway.tokenizer, prompt, skip_special_tokens=skip_special) for prompt in prompts]

    return await gateway.in_thread(decode)


async def _encoded(gateway: Gateway, fields: CompletionRequest, facts: ModelFacts, num_bytes: int) -> list[list[int]]:
    """The prompts of a request of so many bytes. Raises ApiError (400)."""
    add_special_tokens = fields.add_special_tokens is not False

    def ids_of(prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            check_token_ids(prompt, facts.vocab_size, "prompt")
            return prompt
        return gateway.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, max_tokens=facts.context_len)

    def encode() -> list[list[int]]:
        return [ids_of(prompt) for prompt in prompts_of(fields.prompt)]

    try:
        prompts = await gateway.on_text(encode, num_bytes)
    except TooLong as error:
        raise prompt_too_long(error.num_tokens, facts) from None
    if not all(prompts):
        raise invalid("prompt must have at least one token", "prompt")
    return prompts
