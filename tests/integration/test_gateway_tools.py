"""Tool calls and reasoning over HTTP: the exact bytes of their streams, and what of a request is refused."""

import json
import random
import re
from typing import Any

from services.gateway.text import tokenizer
from shared import fake_model
from shared.constraints import compile_constraint, read_vocabulary
from tests.fakes.conversations import HISTORY, PARAMETERS, TIME, WEATHER, prompt_of, tool, with_template
from tests.fakes.gateway_world import World, error_of, events_of, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler, says

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
LATE = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


def normal(body: str) -> str:
    body = re.sub(r'"id":"(chatcmpl)-[0-9a-f]{24}"', r'"id":"\1-X"', body)
    return re.sub(r'"id":"call_[0-9a-f]{24}"', '"id":"call_X"', re.sub(r'"created":\d+', '"created":0', body))


HEAD = (
    'data: {"id":"chatcmpl-X","object":"chat.completion.chunk","created":0,"model":"fake-model","choices":[{"index":0,'
)
ROLE = '{"role":"assistant","content":""}'


def stream_of(*deltas: str, finish: str) -> str:
    lines = [f'{HEAD}"delta":{delta},"logprobs":null,"finish_reason":null}}]}}\n\n' for delta in deltas]
    return "".join(
        [*lines, f'{HEAD}"delta":{{}},"logprobs":null,"finish_reason":"{finish}"}}]}}\n\n', "data: [DONE]\n\n"]
    )


def start(index: int, name: str) -> str:
    function = f'"type":"function","function":{{"name":"{name}","arguments":""}}'
    return f'{{"tool_calls":[{{"index":{index},"id":"call_X",{function}}}]}}'


def more(index: int, text: str) -> str:
    return f'{{"tool_calls":[{{"index":{index},"function":{{"arguments":{json.dumps(text, ensure_ascii=False)}}}}}]}}'


async def test_golden_stream_of_calls() -> None:
    async with world(ScriptedScheduler(says(f"Yes.\n{CALL}\n{LATE}"))) as w:
        response = await w.chat(tools=[WEATHER, TIME], stream=True)
        said = [f'{{"content":"{char}"}}' for char in "Yes."]
        calls = [start(0, "weather"), *(more(0, char) for char in '{"city": "Zürich"}'), start(1, "time")]
        expected = stream_of(ROLE, *said, *calls, *(more(1, char) for char in "{}"), finish="tool_calls")
        assert normal(response.text) == expected


async def test_golden_whole_answer_with_calls() -> None:
    async with world(ScriptedScheduler(says(f"{CALL}{LATE}"))) as w:
        choices = (await w.chat(tools=[WEATHER, TIME])).text.split('"choices":')[1].split(',"usage"')[0]
        function = '{"name":"weather","arguments":"{\\"city\\": \\"Zürich\\"}"}'
        calls = (
            f'{{"id":"call_X","type":"function","function":{function}}},'
            '{"id":"call_X","type":"function","function":{"name":"time","arguments":"{}"}}'
        )
        assert normal(choices) == (
            '[{"index":0,"message":{"role":"assistant","content":null,"refusal":null,"tool_calls":[' + calls + "]},"
            '"logprobs":null,"finish_reason":"tool_calls"}]'
        )


async def test_golden_stream_of_thoughts_and_a_call() -> None:
    text = f"<think>\nhm\n</think>\n\nOk {LATE}"
    async with world(ScriptedScheduler(says(text)), reasoning_parser="think") as w:
        response = await w.chat(tools=[TIME], stream=True)
        deltas = ['{"reasoning_content":"h"}', '{"reasoning_content":"m"}', '{"content":"O"}', '{"content":"k"}']
        call = [start(0, "time"), more(0, "{"), more(0, "}")]
        assert normal(response.text) == stream_of(ROLE, *deltas, *call, finish="tool_calls")
        answer = (await w.chat(tools=[TIME])).json()
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Ok", "hm")
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nhm\n</think")}
        assert message["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}


async def test_streams_and_whole_answers_agree_for_every_choice() -> None:
    scripts = iter([says(f"A {CALL}"), says("plain <tool_call>{")] * 2)
    async with world(ScriptedScheduler(lambda submit: next(scripts)(submit))) as w:
        whole = (await w.chat(tools=[WEATHER], n=2)).json()["choices"]
        events = events_of((await w.chat(tools=[WEATHER], n=2, stream=True)).text)
        for choice in whole:
            parts = [part for event in events[:-1] for part in event["choices"] if part["index"] == choice["index"]]
            text = "".join(part["delta"].get("content", "") for part in parts)
            calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
            assert text == choice["message"]["content"]
            assert parts[-1]["finish_reason"] == choice["finish_reason"]
            told = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])]
            assert "".join(call["function"]["arguments"] for call in calls) == "".join(told)
    assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "stop"]


async def test_a_call_that_is_cut_off_ends_with_length() -> None:
    async with world(ScriptedScheduler(lambda submit: Answer([*CALL.encode()][: submit.max_tokens]))) as w:
        choice = (await w.chat(tools=[WEATHER], max_tokens=58)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Zür'


async def test_stop_strings_logprobs_and_token_ids_of_an_answer_with_calls() -> None:
    async with world(ScriptedScheduler(says(f"Well {CALL} done"))) as w:
        fields = {"tools": [WEATHER], "logprobs": True, "return_token_ids": True}
        choice = (await w.chat(stop=["</tool_call>"], **fields)).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Zürich"}'
        assert choice["message"]["content"] == "Well"
        assert bytes(choice["token_ids"]).decode() == f"Well {CALL}"
        events = events_of((await w.chat(stream=True, **fields)).text)[:-1]
        parts = [event["choices"][0] for event in events]
        assert (
            bytes([i for part in parts for i in part.get("token_ids", []) if i < 256]).decode() == f"Well {CALL} done"
        )
        told = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert len(told) == len(f"Well {CALL} done".encode()) + 1


async def test_calls_after_the_first_are_dropped_without_parallel_tool_calls() -> None:
    async with world(ScriptedScheduler(says(CALL + LATE))) as w:
        for stream in (False, True):
            response = await w.chat(tools=[WEATHER, TIME], parallel_tool_calls=False, stream=stream)
            assert '"name":"weather"' in response.text
            assert '"name":"time"' not in response.text


async def test_tools_are_told_and_called_only_where_they_may_be() -> None:
    async with world(ScriptedScheduler(says(CALL))) as w:
        for choice, is_called in (
            (None, True),
            ("auto", True),
            ("none", False),
            ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("weather")]}}, True),
            ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("time")]}}, False),
        ):
            answer = (await w.chat(tools=[WEATHER, TIME], tool_choice=choice)).json()["choices"][0]
            assert (answer["finish_reason"] == "tool_calls") == is_called
            assert answer["message"]["content"] == (None if is_called else CALL)
            assert ("Tells the weather." in prompt_of(w)) == (choice != "none")
        assert (await w.chat(tool_choice="none")).status_code == 200


DEEP: Any = {}
for _ in range(100):
    DEEP = {"a": [DEEP]}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": 5}),
    ("tools", {"tools": ["f"]}),
    ("tools", {"tools": [{"function": {"name": "f"}}]}),
    ("tools", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tools", {"tools": [{"type": "function", "function": {}}]}),
    ("tools", {"tools": [tool("")]}),
    ("tools", {"tools": [tool("a b")]}),
    ("tools", {"tools": [tool("a" * 65)]}),
    ("tools", {"tools": [tool("é")]}),
    ("tools", {"tools": [tool("f\n")]}),
    ("tools", {"tools": [tool("f"), tool("f")]}),
    ("tools", {"tools": [tool("f", parameters=5)]}),
    ("tools", {"tools": [tool("f", parameters={"type": "array"})]}),
    ("tools", {"tools": [tool("f", description=5)]}),
    ("tools", {"tools": [tool("f", strict="yes")]}),
    ("tools", {"tools": [tool(f"f{index}") for index in range(129)]}),
    ("tools", {"tools": [tool("f", description="a" * 600_000)]}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [], "tool_choice": tool("f")}),
    ("tool_choice", {"tools": [WEATHER], "tool_choice": "any"}),
    ("tool_choice", {"tools": [WEATHER], "tool_choice": 5}),
    ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "function"}}),
    ("tool_choice", {"tools": [WEATHER], "tool_choice": tool("other")}),
    (
        "tool_choice",
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        },
    ),
    (
        "tool_choice",
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}},
        },
    ),
    ("tools", {"tools": [tool("f", parameters={"type": "object", "properties": DEEP})]}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": DEEP}}),
    ("messages", {"messages": [{"role": "user", "content": [DEEP]}]}),
    ("parallel_tool_calls", {"tools": [WEATHER], "parallel_tool_calls": "no"}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": {"name": "f"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": 5}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a b": 1}}),
]


async def test_bad_fields_are_refused_before_the_first_byte() -> None:
    async with world(ScriptedScheduler()) as w:
        for param, fields in BAD:
            for stream in (False, True):
                error_of(await w.chat(stream=stream, **fields), param)
        assert not w.scheduler.submits


async def test_a_server_that_reads_no_calls_refuses_tools() -> None:
    async with world(ScriptedScheduler(says(CALL)), tool_call_parser="none") as w:
        assert "--tool-call-parser" in error_of(await w.chat(tools=[WEATHER]), "tools")["message"]
        assert (await w.chat(tools=[WEATHER], tool_choice="none")).json()["choices"][0]["message"]["content"] == CALL
    unknown = with_template("{{ tools }}{{ messages[0].content }}")
    async with world(ScriptedScheduler(), tokenizer=unknown) as w:
        error_of(await w.chat(tools=[WEATHER]), "tools")


async def test_thoughts_that_are_cut_off_leave_no_content() -> None:
    async with world(ScriptedScheduler(lambda submit: Answer([*b"<think>hm"])), reasoning_parser="think") as w:
        choice = (await w.chat()).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", "hm")
    async with world(ScriptedScheduler(says("<think>hm</think>4"))) as w:
        assert (await w.chat()).json()["choices"][0]["message"]["content"] == "<think>hm</think>4"


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


STRICT = tool("weather", strict=True, parameters={**PARAMETERS, "required": ["city"], "additionalProperties": False})


def may_say(w: World, text: str) -> bool:
    """Whether the last request's constraint lets the model say so and stop there."""
    constraint = w.scheduler.submits[-1].sampling.constraint
    assert constraint is not None
    matcher = compile_constraint(constraint, read_vocabulary(fake_model.facts(), None))
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_calls_are_forced_by_a_constraint() -> None:
    bern, now = call("weather", '{"city": "Bern"}'), call("time", "{}")
    async with world(ScriptedScheduler(says(bern))) as w:
        tools = [STRICT, TIME]
        choice = (await w.chat(tools=tools, tool_choice="required")).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert may_say(w, bern)
        assert may_say(w, f"{now}\n{bern}")
        for text in ("", "Hi.", call("weather", "{}"), f"{bern} Hi."):
            assert not may_say(w, text)
        await w.chat(tools=tools, tool_choice="required", parallel_tool_calls=False)
        assert not may_say(w, f"{now}\n{bern}")
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("time")]}}
        await w.chat(tools=tools, tool_choice=allowed)
        assert may_say(w, now)
        assert not may_say(w, bern)
        choice = (await w.chat(tools=tools, tool_choice=named("weather"))).json()["choices"][0]
        assert choice["finish_reason"] == "stop", "as OpenAI has it for a function that is named"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert may_say(w, bern)
        assert not may_say(w, now)
        assert not may_say(w, f"{bern}\n{bern}")


async def test_under_auto_only_strict_functions_are_a_constraint() -> None:
    async with world(ScriptedScheduler(says("ok"))) as w:
        await w.chat(tools=[WEATHER])
        assert w.scheduler.submits[-1].sampling.constraint is None
        await w.chat(tools=[STRICT])
        for text in ("ok", call("weather", '{"city": "Bern"}'), "ok " + call("weather", '{"city": "Bern"}') + " ok"):
            assert may_say(w, text)
        assert not may_say(w, call("weather", '{"town": "Bern"}'))
        assert not may_say(w, call("other", "{}"))


async def test_under_auto_strict_functions_are_kept_to_in_the_format_of_llama_3() -> None:
    bern = '{"name": "weather", "parameters": {"city": "Bern"}}'
    template = with_template("{{ tools | tojson }}{{ messages[0].content }}<|python_tag|>")
    async with world(ScriptedScheduler(says(bern)), tokenizer=template) as w:
        message = (await w.chat(tools=[STRICT])).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
        for text in ("ok", bern, f"ok <|python_tag|>{bern}"):
            assert may_say(w, text)
        assert not may_say(w, bern.replace("city", "town"))


async def test_a_response_format_is_for_the_text_and_calls_may_come_instead() -> None:
    number = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    async with world(ScriptedScheduler(says("5"))) as w:
        await w.chat(tools=[TIME], response_format=number)
        assert may_say(w, "5")
        assert may_say(w, call("time", "{}"))
        assert not may_say(w, "five")
        await w.chat(tools=[TIME], response_format=number, tool_choice="required")
        assert not may_say(w, "5")
    async with world(ScriptedScheduler(says("5")), reasoning_parser="think") as w:
        await w.chat(response_format=number)
        assert may_say(w, "<think>hm</think>\n\n5")
        assert may_say(w, "5")
        assert not may_say(w, "hm</think>5")


async def test_a_schema_that_cannot_be_kept_to_is_refused() -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    async with world(ScriptedScheduler(says("ok"))) as w:
        for strict, status in ((True, 400), (False, 200)):
            tools = [tool("f", strict=strict, parameters=unique)]
            response = await w.chat(tools=tools, tool_choice="required")
            assert response.status_code == status
        answer = await w.chat(tools=[tool("f", strict=True, parameters=unique)])
        assert "uniqueItems" in error_of(answer, "tools")["message"]
        wrong = [tool("f", parameters={"type": "object", "properties": 5})]
        error_of(await w.chat(tools=wrong, tool_choice="required"), "tools")


async def test_markers_that_are_special_tokens_stay_in_the_text_of_calls_only() -> None:
    fake = with_template("{{ tools | tojson if tools else '' }}{{ messages[0].content }}[TOOL_CALLS]f[ARGS]")
    fake._backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    begin, args = (fake._backend.token_to_id(marker) for marker in ("[TOOL_CALLS]", "[ARGS]"))
    tokenizer_of_it = tokenizer.Tokenizer(fake._model, fake.digest)
    answer = Answer([*b"Well.", begin, *b"time", args, *b"{}", fake_model.IM_END], "stop")
    facts = fake_model.facts()
    scheduler = ScriptedScheduler(lambda submit: answer, facts=facts)
    async with world(scheduler, tokenizer=tokenizer_of_it) as w:
        message = (await w.chat(tools=[TIME])).json()["choices"][0]["message"]
        assert message["content"] == "Well."
        assert message["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}
        assert len(message["tool_calls"][0]["id"]) == 9
        assert (await w.chat()).json()["choices"][0]["message"]["content"] == "Well.time{}"
        assert (await w.complete()).json()["choices"][0]["text"] == "Well.time{}"


async def test_mutated_tools_and_histories_never_give_a_5xx() -> None:
    source = random.Random(17)
    good = {
        "messages": [*HISTORY, {"role": "developer", "content": [{"type": "text", "text": "x"}]}],
        "tools": [STRICT, TIME],
        "tool_choice": named("weather"),
        "chat_template_kwargs": {"a": [1]},
        "max_tokens": 3,
    }
    strange = [None, -1, {}, [], "", True, 1.5, "f", "auto", "required", [[]], [{}], "\0", "a" * 70, {"type": "object"}]
    async with world(ScriptedScheduler(says(CALL[:30]))) as w:
        statuses = set()
        for _ in range(150):
            body = json.loads(json.dumps(good))
            for _ in range(source.randrange(1, 3)):
                place = body
                while True:
                    key = source.choice(list(place) if isinstance(place, dict) else range(len(place)))
                    if not place[key] or not isinstance(place[key], dict | list) or source.random() < 0.2:
                        break
                    place = place[key]
                place[key] = source.choice(strange)
            response = await w.post("/v1/chat/completions", **body)
            assert response.status_code < 500, body
            statuses.add(response.status_code)
        assert statuses >= {200, 400}
        await w.until_idle()
