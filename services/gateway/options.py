"""Options of one gateway process. Built by ``tools`` from the command line; imports no service."""

from dataclasses import dataclass, field
from typing import Literal

from shared.api_keys import ApiKey
from shared.net.curve import PeerKeys

FormatName = Literal["auto", "hermes", "llama3", "mistral", "none"]


@dataclass(frozen=True)
class GatewayOptions:
    """What an operator may choose. Limits of the model are not here: they come from the scheduler by hello."""

    name: str
    """Told to the scheduler; shown in its logs."""
    scheduler: str = "tcp://127.0.0.1:5701"
    """Where the scheduler listens for gateways (a ZeroMQ endpoint)."""
    keys: PeerKeys | None = None
    """For a scheduler that asks for them; None is none."""
    model: str = ""
    """Folder with tokenizer.json and tokenizer_config.json; not used with the fake backend."""
    backend: Literal["torch", "fake"] = "torch"
    served_model_name: str = "default"
    host: str = "127.0.0.1"
    port: int = 8000
    """0 picks a free one."""
    fd: int | None = None
    """A listening socket inherited from the parent process, used in place of ``host`` and ``port``."""
    ssl_certfile: str = ""
    """Certificate, with those between it and a known authority; TLS is served where it is given."""
    ssl_keyfile: str = ""
    """Its key; empty when it is in the same file."""
    ssl_keyfile_password: str = field(default="", repr=False)
    metrics_host: str = "127.0.0.1"
    """Where ``metrics_port`` listens; no key is asked for there."""
    metrics_port: int | None = None
    """Port of the gateway's own ``/metrics`` and ``/health``; 0 picks one, None is no server."""
    api_keys: tuple[ApiKey, ...] = ()
    """Empty: no key is asked for."""
    cors_origins: tuple[str, ...] = ()
    debug_endpoints: bool = False
    log_level: str = "info"
    log_format: str = "text"
    """``text`` or ``json``."""
    otlp_endpoint: str = ""
    """Of a collector that takes spans over OTLP/HTTP; empty is none."""
    drain_timeout_s: float = 30.0
    """How long live streams may go on after a request to stop."""
    recovery_timeout_s: float = 60.0
    """How long live streams wait for a scheduler with an executor before they end with an error."""
    tool_call_parser: FormatName = "auto"
    """The format in which the model writes tool calls; auto finds it in the chat template."""
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """Whether thoughts are split off the model's text; auto finds it in the chat template."""
    trust_request_chat_template: bool = False
    """Whether ``chat_template`` of a request is honoured: it is a program that the client wrote."""
    seed: int | None = None
    """Makes the seeds of requests that bring none repeatable."""
