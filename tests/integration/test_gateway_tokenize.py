"""``/tokenize`` and ``/detokenize``: what a completion and a chat would send, there and back."""

from typing import Any

import pytest

from services.gateway.api import tokenize
from shared import fake_model
from shared.wire import tokens
from tests.fakes.gateway_world import world
from tests.fakes.scripted_scheduler import ScriptedScheduler

MESSAGES = [{"role": "user", "content": "hé"}]


async def test_the_ids_are_those_of_a_completion_and_of_a_chat() -> None:
    async with world(ScriptedScheduler()) as w:
        for answer_of, fields in ((w.complete, {"prompt": "hé <|im_end|>"}), (w.chat, {"messages": MESSAGES})):
            assert (await answer_of(**fields, max_tokens=1)).status_code == 200
            told = (await w.post("/tokenize", **fields, return_token_strs=True)).json()
            ids = tokens.unpack(w.scheduler.submits[-1].prompt)
            assert told["tokens"] == ids
            assert (told["count"], told["max_model_len"]) == (len(ids), fake_model.CONTEXT_LEN)
            assert len(told["token_strs"]) == len(ids)
            assert "<|im_end|>" in told["token_strs"]
            assert (await w.post("/tokenize", **fields)).json()["token_strs"] is None
            text = b"".join(map(fake_model.token_bytes, ids)).decode()
            assert (await w.post("/detokenize", tokens=ids)).json() == {"prompt": text}


async def test_the_parts_of_a_chats_prompt_count() -> None:
    async with world(ScriptedScheduler()) as w:
        whole = (await w.post("/tokenize", messages=MESSAGES)).json()["count"]
        bare = (await w.post("/tokenize", messages=MESSAGES, add_generation_prompt=False)).json()["count"]
        gone_on = (await w.post("/tokenize", messages=MESSAGES, continue_final_message=True)).json()["count"]
        assert whole > bare > gone_on


async def test_nothing_is_something() -> None:
    async with world(ScriptedScheduler()) as w:
        assert (await w.post("/tokenize", prompt="")).json()["count"] == 0
        assert (await w.post("/detokenize", tokens=[])).json() == {"prompt": ""}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "a" * 11}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
    ("/tokenize", {"messages": MESSAGES, "chat_template": "{% if %}"}, "chat_template"),
    ("/tokenize", {"messages": MESSAGES, "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [fake_model.VOCAB_SIZE]}, "tokens"),
    ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
]


async def test_what_is_wrong_is_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "MAX_TOKENS", 10)
    async with world(ScriptedScheduler()) as w:
        for path, fields, param in WRONG:
            response = await w.post(path, **fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), fields


async def test_it_asks_for_a_key() -> None:
    async with world(ScriptedScheduler(), api_keys=("sk",)) as w:
        assert (await w.post("/tokenize", prompt="a")).status_code == 401
        assert (await w.http.post("/tokenize", json={"prompt": "a"}, headers={"x-api-key": "sk"})).status_code == 200
