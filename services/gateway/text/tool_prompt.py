"""Tells a model of tools whose chat template knows none: as plain messages, in the Hermes format. Pure.

Called by ``services.gateway.text.chat_template``. The functions go into the system message, calls into the text of
the assistant's, results into messages of the user.
"""

import json
from typing import Any

from services.gateway.text.tool_calls.hermes import BEGIN, END

_INSTRUCTIONS = f"""\
You can call functions. These are their signatures, one a line, as JSON schemas:
<tools>
{{tools}}
</tools>
To call one, write its name and its arguments as a JSON object, like this:
{BEGIN}
{{{{"name": "function name", "arguments": {{{{"argument": "value"}}}}}}}}
{END}"""


def with_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as messages of role and content only, where it speaks of tools."""
    told = [_plain(message) for message in messages]
    if not tools:
        return told
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [f"{BEGIN}\n{_call(call)}\n{END}" for call in message.get("tool_calls", ())]
    if not calls:
        return message
    return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *calls])}


def _call(call: dict[str, Any]) -> str:
    function = call["function"]
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
