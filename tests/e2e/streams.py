"""Streams for end-to-end tests: what one stream said, read with the official client, and many of them at once."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import openai

from tests.e2e.prompts import Prompt


@dataclass
class Said:
    """What a stream has said so far."""

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int = 0
    prompt_tokens: int = 0
    chunks: int = 0
    first: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the first text."""
    token_ids: list[int] = field(default_factory=list)


async def stream(client: openai.AsyncOpenAI, prompt: Prompt, said: Said | None = None, **options: Any) -> Said:
    """Stream one prompt to its end, by chat or completion; ``said`` grows meanwhile. Raises what the client raises."""
    said = said or Said()
    extra = {"return_token_ids": True} | options.pop("extra_body", {})
    common = {"model": "default", "stream": True, "stream_options": {"include_usage": True}, "extra_body": extra}
    common |= options
    if prompt.chat:
        events: Any = await client.chat.completions.create(
            messages=[{"role": "user", "content": prompt.text}], **common
        )
    else:
        events = await client.completions.create(prompt=prompt.text, **common)
    async for event in events:
        if event.usage is not None:
            said.completion_tokens, said.prompt_tokens = event.usage.completion_tokens, event.usage.prompt_tokens
        for choice in event.choices:
            text = (choice.delta.content if prompt.chat else choice.text) or ""
            said.token_ids += getattr(choice, "token_ids", None) or []
            said.text += text
            said.chunks += 1
            if text:
                said.first.set()
            said.finish_reason = choice.finish_reason or said.finish_reason
    return said


async def together(*streams: Coroutine[Any, Any, Said], stagger_s: float = 0.0) -> list[Said]:
    """Run streams at once, each started ``stagger_s`` after the one before."""
    tasks = []
    for each in streams:
        tasks.append(asyncio.create_task(each))
        await asyncio.sleep(stagger_s)
    return list(await asyncio.gather(*tasks))


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine function from a plain test."""
    return asyncio.run(main())
