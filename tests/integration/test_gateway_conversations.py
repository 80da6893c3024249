"""Conversations, with tools or without, and what templates make of them: cases TEMPLATE 22-24."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from services.gateway.text import fake_tokenizer
from services.gateway.text.tokenizer import Tokenizer as GatewayTokenizer
from shared import fake_model
from shared.wire import tokens
from tests.fakes.conversations import HISTORY, PARAMETERS, USER, WEATHER, prompt_of, with_template
from tests.fakes.gateway_world import error_of, world
from tests.fakes.scripted_scheduler import ScriptedScheduler, says


async def test_template_22_messages_that_a_template_may_refuse() -> None:
    async with world(ScriptedScheduler()) as w:
        user = {"role": "user", "content": "hi"}
        for messages in (
            [{"role": "assistant", "content": "a"}],
            [{"role": "system", "content": "s"}],
            [user, user],
            [{"role": "tool", "content": "t"}],
            [{"role": "developer", "content": "d"}, user],
            [user, {"role": "assistant", "content": None, "tool_calls": [_call("{}")]}, user],
        ):
            assert (await w.chat(messages=messages, max_tokens=1)).status_code == 200
        num_submits = len(w.scheduler.submits)
        for bad in (
            [],
            None,
            "hi",
            [5],
            [{"role": "user"}],
            [{"content": "no role"}],
            [{"role": "user", "content": 5}],
            [{"role": 5, "content": "a"}],
            [{"role": "user", "content": None}],
            [{"role": "assistant", "content": None, "tool_calls": [_call("{")]}],
            [{"role": "assistant", "content": "a", "tool_calls": 5}],
        ):
            error_of(await w.chat(messages=bad), "messages")
        assert len(w.scheduler.submits) == num_submits


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


async def test_template_22_a_template_that_raises_is_400() -> None:
    for template in (
        "{{ raise_exception('Conversation roles must alternate') }}",
        "{{ messages[0].nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{% for",
    ):
        async with world(ScriptedScheduler(), tokenizer=with_template(template)) as w:
            error = error_of(await w.chat(), "messages")
            assert not w.scheduler.submits
    assert error["message"]
    async with world(ScriptedScheduler(), tokenizer=with_template("{{ raise_exception('roles alternate') }}")) as w:
        assert "roles alternate" in error_of(await w.chat())["message"]
    async with world(ScriptedScheduler(), tokenizer=with_template("")) as w:
        assert "no chat template" in error_of(await w.chat())["message"]


async def test_template_23_content_as_a_list_of_parts() -> None:
    async with world(ScriptedScheduler()) as w:
        parts = [{"type": "text", "text": "My name is Ann."}, {"type": "text", "text": " What is my name?"}]
        split = (await w.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)).json()
        as_parts = prompt_of(w)
        joined = "My name is Ann. What is my name?"
        plain = (await w.chat(messages=[{"role": "user", "content": joined}], max_tokens=1)).json()
        assert as_parts == prompt_of(w)
        assert split["usage"] == plain["usage"]
        assert "{'type'" not in as_parts
        await w.chat(messages=[{"role": "user", "content": []}], max_tokens=1)
        empty = prompt_of(w)
        await w.chat(messages=[{"role": "user", "content": ""}], max_tokens=1)
        assert empty == prompt_of(w)
        for part in ({"type": "text"}, {"type": "text", "text": 5}, {"text": "x"}, "x", {"type": 5}):
            error_of(await w.chat(messages=[{"role": "user", "content": [part]}]), "messages")
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        assert "image_url" in error_of(await w.chat(messages=[{"role": "user", "content": [image]}]))["message"]


async def test_continue_final_message_and_generation_prompt() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    async with world(ScriptedScheduler()) as w:
        await w.chat(messages=messages, continue_final_message=True, max_tokens=1)
        assert prompt_of(w).endswith("<|im_start|>assistant\nWell, ")
        await w.chat(messages=messages, add_generation_prompt=False, max_tokens=1)
        assert prompt_of(w).endswith("Well, <|im_end|>\n")
        await w.chat(messages=messages, max_tokens=1)
        assert prompt_of(w).endswith("<|im_start|>assistant\n")
        both = {"continue_final_message": True, "add_generation_prompt": True}
        error_of(await w.chat(messages=messages, **both), "continue_final_message")


def _doubling_tokenizer() -> GatewayTokenizer:
    """Its template spells BOS and its tokenizer adds BOS."""
    backend: Tokenizer = fake_tokenizer.fake_tokenizer()._backend
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", fake_model.IM_START)]
    )
    template = "<|im_start|>{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", chat_template=template)
    return GatewayTokenizer(model, fake_model.TOKENIZER_DIGEST)


async def test_template_24_one_bos_at_most() -> None:
    tokenizer = _doubling_tokenizer()
    bos = fake_model.IM_START
    async with world(ScriptedScheduler(), tokenizer=tokenizer) as w:

        async def ids(path: str, **fields: Any) -> list[int]:
            response = await w.post(path, max_tokens=1, **fields)
            assert response.status_code == 200, response.text
            return tokens.unpack(w.scheduler.submits[-1].prompt)

        reference = tokenizer._model.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
        messages = [{"role": "user", "content": "hi"}]
        assert await ids("/v1/chat/completions", messages=messages) == reference == [bos, *b"hi"]
        assert await ids("/v1/chat/completions", messages=messages, add_special_tokens=True) == [bos, *b"hi"]
        assert await ids("/v1/completions", prompt="hi") == [bos, *b"hi"]
        assert await ids("/v1/completions", prompt="<|im_start|>hi") == [bos, *b"hi"]
        assert await ids("/v1/completions", prompt="hi", add_special_tokens=False) == [*b"hi"]


async def test_template_history_of_calls_for_a_template_without_tools() -> None:
    async with world(ScriptedScheduler(says("ok"))) as w:
        response = await w.chat(messages=HISTORY, tools=[WEATHER])
        assert response.status_code == 200
        assert prompt_of(w).endswith(
            "<|im_start|>user\nhi<|im_end|>\n"
            '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\nfine\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        assert '\n{"type": "function", "function": {"name": "weather"' in prompt_of(w).split("<tools>")[1]
        await w.chat(messages=[{"role": "system", "content": "Be brief."}, *HISTORY], tools=[WEATHER])
        assert prompt_of(w).startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
        assert prompt_of(w).count("<|im_start|>system") == 1


CALLS_LOOP = (
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %};{% endfor %}{{ tools | tojson if tools else '' }}"
)


@pytest.mark.parametrize(
    "call",
    [
        "{{ c.function.arguments | tojson }}",
        "{{ c.function.name + c.function.arguments }}",
        "{{ c.function.arguments }}",
        "{% if m.content is none %}{{ c.function.arguments | tojson }}{% endif %}",
        "{{ c.function.arguments + '' if m.content is none }}",
    ],
)
async def test_template_arguments_are_given_as_each_template_takes_them(call: str) -> None:
    source = CALLS_LOOP.replace("CALL", call)
    async with world(ScriptedScheduler(says("ok")), tokenizer=with_template(source)) as w:
        for arguments in ('{"a": "ü"}', {"a": "ü"}, None, ""):
            calls = [{"function": {"name": "f", "arguments": arguments}}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
            assert (await w.chat(messages=[USER, message])).status_code == 200
            assert ('{"a": "ü"}' if arguments else "{}") in prompt_of(w)
            assert "None" not in prompt_of(w)
        for bad in (
            {},
            {"name": "f", "arguments": "[1]"},
            {"name": "f", "arguments": 5},
            {"name": "f", "arguments": False},
            {"name": "f", "arguments": []},
            {"name": "f", "arguments": "{"},
        ):
            error_of(await w.chat(messages=[USER, {**message, "tool_calls": [{"function": bad}]}]), "messages")


async def test_template_tools_are_given_to_a_template_that_takes_them() -> None:
    source = CALLS_LOOP + "<tool_call>{{ raise_exception('no f') if messages[0].content == 'f' }}"
    async with world(
        ScriptedScheduler(says('<tool_call>{"name": "weather", "arguments": {}}')), tokenizer=with_template(source)
    ) as w:
        assert (await w.chat(tools=[WEATHER])).json()["choices"][0]["finish_reason"] == "tool_calls"
        given = json.loads(prompt_of(w).split("user:hi;")[1].removesuffix("<tool_call>"))
        assert given == [
            {
                "type": "function",
                "function": {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS},
            }
        ]
        answer = await w.chat(messages=[{"role": "user", "content": "f"}], tools=[WEATHER])
        message = error_of(answer, "messages")["message"]
        assert message.endswith("no f")


async def test_template_developer_is_system_where_the_template_knows_no_such_role() -> None:
    messages = [{"role": "developer", "content": "d"}, USER]
    async with world(ScriptedScheduler(says("ok"))) as w:
        await w.chat(messages=messages)
        assert prompt_of(w).startswith("<|im_start|>system\nd")
    source = "{% for m in messages %}{{ m.role if m.role != 'developer' else 'boss' }}{% endfor %}"
    async with world(ScriptedScheduler(says("ok")), tokenizer=with_template(source)) as w:
        await w.chat(messages=messages)
        assert prompt_of(w) == "bossuser"


async def test_template_variables_reach_the_template() -> None:
    source = "{{ messages[0].content }}{% if enable_thinking is not false %}<think>\n{% endif %}"
    async with world(ScriptedScheduler(says("hm</think>4")), tokenizer=with_template(source)) as w:
        message = (await w.chat()).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("4", "hm")
        message = (await w.chat(chat_template_kwargs={"enable_thinking": False})).json()["choices"][0]["message"]
        assert prompt_of(w) == "hi"
        assert message == {"role": "assistant", "content": "hm</think>4", "refusal": None}
