"""Conversations and chat templates: cases TEMPLATE 22-24."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from services.gateway.text import fake_tokenizer
from services.gateway.text.tokenizer import Tokenizer as GatewayTokenizer
from shared import fake_model
from shared.wire import tokens
from tests.fakes.gateway_world import World, error_of, world
from tests.fakes.scripted_scheduler import ScriptedScheduler


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


def _with_template(template: str) -> GatewayTokenizer:
    tokenizer = fake_tokenizer.fake_tokenizer()
    tokenizer._model.chat_template = template
    return tokenizer


async def test_template_22_a_template_that_raises_is_400() -> None:
    for template in (
        "{{ raise_exception('Conversation roles must alternate') }}",
        "{{ messages[0].nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{% for",
    ):
        async with world(ScriptedScheduler(), tokenizer=_with_template(template)) as w:
            error = error_of(await w.chat(), "messages")
            assert not w.scheduler.submits
    assert error["message"]
    async with world(ScriptedScheduler(), tokenizer=_with_template("{{ raise_exception('roles alternate') }}")) as w:
        assert "roles alternate" in error_of(await w.chat())["message"]
    async with world(ScriptedScheduler(), tokenizer=_with_template("")) as w:
        assert "no chat template" in error_of(await w.chat())["message"]


def _prompt(w: World) -> str:
    return w.gateway.tokenizer.decode(tokens.unpack(w.scheduler.submits[-1].prompt), skip_special_tokens=False)


async def test_template_23_content_as_a_list_of_parts() -> None:
    async with world(ScriptedScheduler()) as w:
        parts = [{"type": "text", "text": "My name is Ann."}, {"type": "text", "text": " What is my name?"}]
        split = (await w.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)).json()
        as_parts = _prompt(w)
        joined = "My name is Ann. What is my name?"
        plain = (await w.chat(messages=[{"role": "user", "content": joined}], max_tokens=1)).json()
        assert as_parts == _prompt(w)
        assert split["usage"] == plain["usage"]
        assert "{'type'" not in as_parts
        await w.chat(messages=[{"role": "user", "content": []}], max_tokens=1)
        empty = _prompt(w)
        await w.chat(messages=[{"role": "user", "content": ""}], max_tokens=1)
        assert empty == _prompt(w)
        for part in ({"type": "text"}, {"type": "text", "text": 5}, {"text": "x"}, "x", {"type": 5}):
            error_of(await w.chat(messages=[{"role": "user", "content": [part]}]), "messages")
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        assert "image_url" in error_of(await w.chat(messages=[{"role": "user", "content": [image]}]))["message"]


async def test_continue_final_message_and_generation_prompt() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    async with world(ScriptedScheduler()) as w:
        await w.chat(messages=messages, continue_final_message=True, max_tokens=1)
        assert _prompt(w).endswith("<|im_start|>assistant\nWell, ")
        await w.chat(messages=messages, add_generation_prompt=False, max_tokens=1)
        assert _prompt(w).endswith("Well, <|im_end|>\n")
        await w.chat(messages=messages, max_tokens=1)
        assert _prompt(w).endswith("<|im_start|>assistant\n")
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
