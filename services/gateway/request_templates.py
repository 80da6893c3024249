"""Chat templates that come with requests, rendered outside of the gateway. Owned by ``services.gateway.gateway``."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.api.errors import invalid, overloaded, unavailable
from services.gateway.helper_process import HelperBusy, HelperLost, HelperProcess
from services.gateway.template_process import Rendered, Task
from services.gateway.text.chat_prompt import refusal
from services.gateway.text.chat_template import Conversation

_log = logging.getLogger(__name__)

MAX_TEMPLATE_CHARS = 64 * 1024


class RequestTemplates:
    """Renders them where the operator trusts clients with that: a template is a program."""

    def __init__(self, *, trusted: bool) -> None:
        self._trusted = trusted
        self._process = HelperProcess("services.gateway.template_process")

    def check(self, source: str) -> None:
        """Raise ApiError (400) unless the template may be tried."""
        if not self._trusted:
            option = "--trust-request-chat-template"
            raise invalid(f"chat_template is only taken from requests by a server with {option}", "chat_template")
        if len(source) > MAX_TEMPLATE_CHARS:
            raise invalid(f"chat_template may have at most {MAX_TEMPLATE_CHARS} characters", "chat_template")

    async def render(self, source: str, special_tokens: Mapping[str, Any], conversation: Conversation) -> str:
        """The prompt's text. Raises TemplateError, and ApiError (429 or 503) where nobody can tell."""
        task = msgspec.json.encode(Task(source, dict(special_tokens), conversation))
        try:
            rendered = msgspec.json.decode(await self._process.ask(task), type=Rendered)
        except HelperBusy:
            raise overloaded("too many chat templates at once") from None
        except (HelperLost, msgspec.DecodeError) as error:
            _log.error("chat templates of requests cannot be rendered: %s", type(error).__name__)
            raise unavailable("the chat template could not be rendered") from None
        if rendered.problem:
            raise refusal(rendered.problem)
        return rendered.text

    async def close(self) -> None:
        """End the process."""
        await self._process.close()
