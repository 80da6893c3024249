"""What the endpoints answer is what the description says: every answer is read with the type it is described by."""

from typing import Any

import msgspec
import pytest

from services.gateway.openapi import answers, anthropic_answers
from services.gateway.openapi.operations import OPERATIONS
from shared import fake_model
from tests.fakes.answers import named_events
from tests.fakes.gateway_world import World, events_of, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2},
    "/v1/completions": {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "return_token_ids": True},
    "/v1/responses": {"input": "hi", "metadata": {"a": "b"}, "top_logprobs": 1, "reasoning": {"effort": "low"}},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "hi", "return_token_strs": True},
    "/detokenize": {"tokens": [65]},
}


def the_world(**options: Any) -> Any:
    scheduler = ScriptedScheduler(lambda submit: Answer([*b"hello", fake_model.IM_END], "stop"))
    return world(scheduler, debug_endpoints=True, **options)


async def ask(w: World, method: str, path: str, **headers: str) -> Any:
    return await w.http.request(method, path.replace("{model}", "default"), json=BODIES.get(path), headers=headers)


async def test_answers_in_one_piece_are_as_described() -> None:
    async with the_world() as w:
        for operation in OPERATIONS:
            response = await ask(w, operation.method, operation.path)
            assert response.status_code == 200, (operation.path, response.text)
            media = response.headers["content-type"].split(";")[0]
            if isinstance(operation.answer, str):
                assert media == operation.answer
            else:
                assert media == "application/json"
                msgspec.convert(response.json(), operation.answer)
            assert "x-request-id" in response.headers


async def test_answers_to_anthropics_clients_are_as_described() -> None:
    async with the_world(api_keys=("sk",)) as w:
        for operation in OPERATIONS:
            if operation.anthropic is None:
                continue
            version = {"anthropic-version": "2023-06-01"}
            response = await ask(w, operation.method, operation.path, **version, **{"x-api-key": "sk"})
            msgspec.convert(response.json(), operation.anthropic)
            refused = await ask(w, operation.method, operation.path, **version)
            assert refused.status_code == 401
            msgspec.convert(refused.json(), anthropic_answers.AnthropicError)


async def test_events_are_as_described() -> None:
    async with the_world() as w:
        for path, kind in (
            ("/v1/chat/completions", answers.ChatCompletionChunk),
            ("/v1/completions", answers.Completion),
        ):
            options = {"stream": True, "stream_options": {"include_usage": True}}
            events = events_of((await w.post(path, **{**BODIES[path], **options})).text)
            assert len(msgspec.convert(events[:-1], list[kind])) > 5
        for path in ("/v1/responses", "/v1/messages"):
            response = await w.post(path, **{**BODIES[path], "stream": True})
            described = next(operation for operation in OPERATIONS if operation.path == path)
            for name, data in named_events(response.text):
                assert name in described.event_names
                if "response" in data:
                    msgspec.convert(data["response"], answers.Response)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 503])
async def test_errors_are_as_described(status: int) -> None:
    async with the_world(api_keys=("sk",)) as w:
        seen = 0
        w.gateway.draining = status == 503
        for operation in OPERATIONS:
            if status not in operation.refusals or (operation.request is None and status == 404):
                continue
            body = {
                400: b"{",
                413: b" " * 9_000_000,
            }.get(status, b"{}")
            if status == 404:
                body = msgspec.json.encode({**BODIES[operation.path], "model": "x"})
            headers = {} if status == 401 else {"x-api-key": "sk"}
            response = await w.http.request(operation.method, operation.path, content=body, headers=headers)
            assert response.status_code == status, (operation.path, response.text)
            is_ready = operation.path == "/ready"
            msgspec.convert(response.json(), answers.Status if is_ready else operation.error)
            seen += 1
        assert seen >= 7


async def test_it_is_served_to_who_has_a_key() -> None:
    async with the_world(api_keys=("sk",)) as w:
        for path in ("/openapi.json", "/docs"):
            assert (await w.http.get(path)).status_code == 401
            assert (await w.http.get(path, headers={"x-api-key": "sk"})).status_code == 200
        document = (await w.http.get("/openapi.json", headers={"x-api-key": "sk"})).json()
        assert document["security"]
    async with the_world() as w:
        assert (await w.http.get("/openapi.json")).json()["security"] == []
