"""MODEL 42: the default model's turns end at their mark, which is in no text, and count alike however they are read."""

from typing import Any

import pytest

from tests.e2e.conftest import StartSystem
from tests.e2e.prompts import Prompt
from tests.e2e.streams import stream

pytestmark = pytest.mark.model
QUESTIONS = ["What is the capital of France?", "Say hello.", "What is 2 + 2?"]
MARK = "<|im_end|>"


async def test_model_42_turns_end_and_their_mark_is_in_no_text(start_system: StartSystem) -> None:
    system = start_system(backend="torch", dtype="float32")
    greedy: dict[str, Any] = {"temperature": 0}
    async with system.async_client(timeout=200) as client:
        for question in QUESTIONS:
            messages: Any = [{"role": "user", "content": question}]
            whole = await client.chat.completions.create(model="default", messages=messages, max_tokens=300, **greedy)
            said = await stream(client, Prompt(question, chat=True), max_tokens=300, **greedy)
            assert whole.choices[0].finish_reason == said.finish_reason == "stop"
            assert whole.choices[0].message.content == said.text
            assert MARK not in said.text
            assert whole.usage is not None
            assert whole.usage.completion_tokens == said.completion_tokens == len(said.token_ids)
        longer = said.completion_tokens + 10
        extra = {"ignore_eos": True, "skip_special_tokens": False}
        on = await stream(client, Prompt(question, chat=True), max_tokens=longer, extra_body=extra, **greedy)
        assert (on.finish_reason, on.completion_tokens) == ("length", longer)
        assert on.text.startswith(said.text + MARK)
