"""The options of every command, each written once: its name, its environment variable, its help and its limits.

``option_groups`` and the commands list them, with their defaults. Imports no service, so that a command's help needs
none.
"""

import os
import re
from typing import Annotated, Any, Literal

import typer

from shared.config import variable_of
from shared.wire.facts import MAX_BLOCKS, MAX_STEP_TOKENS

Backend = Literal["torch", "fake"]
Device = Literal["auto", "cpu", "cuda"]
Switch = Literal["on", "off"]
Dtype = Literal["auto", "bfloat16", "float32", "float16"]
Quantization = Literal["none", "int8"]
LogLevel = Literal["debug", "info", "warning", "error"]
ToolCallParser = Literal["auto", "hermes", "llama3", "mistral", "none"]
ReasoningParser = Literal["auto", "none", "think"]
LogFormat = Literal["text", "json"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def option(name: str, help_text: str, variables: tuple[str, ...] = (), **more: Any) -> Any:
    """An option ``--name`` that may also be given as ``PATERNOSTER_NAME``, or else as one of ``variables``."""
    own = variable_of(name)
    names = [own, *variables] if variables else own
    return typer.Option(f"--{name}", envvar=names, show_envvar=False, help=help_text, **more)


def switch(name: str, help_text: str) -> Any:
    """An option that is on when named, and off again with ``--no-name``."""
    return typer.Option(f"--{name}/--no-{name}", envvar=variable_of(name), show_envvar=False, help=help_text)


def parse_bytes(text: str) -> int:
    """A number of bytes with an optional unit: ``4G``, ``512MiB``, ``1000000``. Raises BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number of bytes such as 4G or 512MiB")
    count = int(float(match[1]) * _UNITS[match[2].upper()])
    if count < 1:
        raise typer.BadParameter(f"{text!r} is no memory at all")
    return count


def told(error: Exception) -> str:
    """An error for a person: what could not be read and why, without the system's number for it."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)


def writable(path: str) -> str:
    """A file that can be written, or nothing: known before the work whose figures go there. Raises BadParameter."""
    place = path if os.path.exists(path) else os.path.dirname(path) or "."
    if path and (os.path.isdir(path) or not os.access(place, os.W_OK)):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


def web_address(url: str) -> str:
    """An http or https URL, or nothing. Raises BadParameter."""
    if url and not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{url!r} is not an http or https URL")
    return url


JsonFile = Annotated[str, option("json", "File for the figures as JSON.", callback=writable)]

# Where things listen.
Host = Annotated[str, option("host", "Address to listen on.")]
Port = Annotated[int, option("port", "HTTP port; 0 takes a free one.", min=0, max=65535)]
MetricsHost = Annotated[str, option("host", "Address for /metrics and /health.")]
MetricsPort = Annotated[
    int, option("metrics-port", "Port for the process's own /metrics and /health; 0 is none.", min=0, max=65535)
]
UpMetricsPort = Annotated[
    int,
    option(
        "metrics-port",
        "Port of the scheduler's /metrics; executors follow from +1, gateways from +100; 0 is none.",
        min=0,
        max=65435,
    ),
]
LinkPort = Annotated[
    int,
    option(
        "link-port",
        "Port where gateways find the scheduler; executors use the next one; 0 takes free ones.",
        min=0,
        max=65534,
    ),
]
GatewaysEndpoint = Annotated[str, option("gateways-endpoint", "Where gateways connect, as tcp://ADDRESS:PORT.")]
ExecutorsEndpoint = Annotated[str, option("executors-endpoint", "Where executors connect, as tcp://ADDRESS:PORT.")]
GatewayScheduler = Annotated[str, option("scheduler", "The scheduler's endpoint for gateways.")]
ExecutorScheduler = Annotated[str, option("scheduler", "The scheduler's endpoint for executors.")]
ListenFd = Annotated[int | None, option("fd", "A listening socket, inherited from the parent.", min=0, hidden=True)]

CurveSecretFile = Annotated[
    str, option("curve-secret-file", "This process's secret key for the links, as 'paternoster keys' makes it.")
]
CurveClients = Annotated[str, option("curve-clients", "Folder with the public keys of those who may connect.")]
CurveSchedulerFile = Annotated[str, option("curve-scheduler-file", "The scheduler's public key.")]

# How many processes, and their names.
Gateways = Annotated[int, option("gateways", "Gateway processes; they share the HTTP port.", min=1, max=64)]
Executors = Annotated[int, option("executors", "Executor processes.", min=1, max=64)]
Name = Annotated[str, option("name", "Name of this process in logs and metrics; the host's name unless given.")]

# The model and the device.
Model = Annotated[str, option("model", "'default', a hub id, a local folder or a .gguf file.")]
ModelFolder = Annotated[str, option("model", "Folder that 'paternoster model fetch' has filled.")]
ServedModelName = Annotated[str, option("served-model-name", "Name in the API; the model's own unless given.")]
BackendOption = Annotated[
    Backend, option("backend", "'torch' runs the model; 'fake' makes text up and needs neither model nor torch.")
]
DeviceOption = Annotated[Device, option("device", "Where the model runs.")]
DtypeOption = Annotated[
    Dtype, option("dtype", "Number format; auto is bfloat16 where the device is made for it, else float32.")
]
QuantizationOption = Annotated[
    Quantization, option("quantization", "int8 keeps weights as 8-bit integers: faster and smaller on CPUs.")
]
Threads = Annotated[
    int | None, option("threads", "Compute threads of one executor; its share of the cores unless given.", min=1)
]

# The executor's size.
BlockSize = Annotated[int, option("block-size", "Tokens in one KV block.", min=1, max=256)]
NumBlocks = Annotated[
    int | None, option("num-blocks", "KV blocks of one executor; by memory unless given.", min=1, max=MAX_BLOCKS)
]
KvMemory = Annotated[
    int | None,
    option("kv-memory", "Memory for one executor's KV blocks, such as 2G.", parser=parse_bytes, metavar="BYTES"),
]
MaxLanes = Annotated[int, option("max-lanes", "Most requests that run at once on one executor.", min=1, max=4096)]
MaxStepTokens = Annotated[
    int, option("max-step-tokens", "Most tokens in one step of one executor.", min=1, max=MAX_STEP_TOKENS)
]
StepTokensCap = Annotated[
    int | None, option("max-step-tokens", "Most tokens in one step, whatever the executor allows.", min=1)
]
MaxModelLen = Annotated[
    int | None, option("max-model-len", "Longest prompt plus output; the model's own limit unless given.", min=2)
]

# The scheduler.
MaxInflight = Annotated[int, option("max-inflight", "Steps sent ahead to each executor.", min=1, max=2)]
PolicyOption = Annotated[
    Literal["continuous", "prefill-first", "static"],
    option("policy", "How steps are composed; the last two are older ways, to be compared with."),
]
StaticBatchSize = Annotated[int, option("static-batch-size", "Policy static: requests in a batch.", min=1)]
StaticWaitMs = Annotated[
    int, option("static-wait-ms", "Policy static: how long the first of a batch waits for it to fill.", min=0)
]
MaxQueue = Annotated[
    int | None, option("max-queue", "Most waiting requests before new ones get 429; no limit unless given.", min=1)
]
MaxQueueTokens = Annotated[
    int | None,
    option(
        "max-queue-tokens", "Most tokens of waiting requests before new ones get 429; no limit unless given.", min=1
    ),
]
TtftLimitMs = Annotated[
    int | None,
    option("ttft-limit-ms", "Requests whose first token is predicted to come later get 429 at once.", min=1),
]
AgeingMs = Annotated[
    int, option("ageing-ms", "How long a priority may wait without being served before it has a turn.", min=1)
]
TenantWeights = Annotated[
    list[str] | None,
    option("tenant-weight", "Share of a tenant, as NAME=WEIGHT, 1 unless given; repeatable. See docs/operations.md."),
]
PrefixCache = Annotated[
    Switch, option("prefix-cache", "Keep the KV of prompts and answers, and share it among requests that begin alike.")
]
StepTimeout = Annotated[
    float, option("step-timeout", "Seconds after which a step that has not ended counts as a lost executor.", min=0.1)
]
RecoveryTimeout = Annotated[
    float, option("recovery-timeout", "Seconds a stream waits for an executor or the scheduler to come back.", min=0)
]
Journal = Annotated[
    str,
    option(
        "journal",
        "File where the scheduler writes down all that happens, for 'paternoster replay'.",
        callback=writable,
    ),
]
JournalRedact = Annotated[bool, switch("journal-redact", "Replace token ids in the journal: it then tells no text.")]

# The gateway.
SslCertfile = Annotated[
    str, option("ssl-certfile", "Certificate (PEM, with its chain); HTTPS is served instead of HTTP.")
]
SslKeyfile = Annotated[str, option("ssl-keyfile", "The certificate's key, unless it is in the same file.")]
SslKeyfilePassword = Annotated[str, option("ssl-keyfile-password", "Password of that key.")]
GatewayMetricsHost = Annotated[str, option("metrics-host", "Address for the process's own /metrics and /health.")]
ApiKeys = Annotated[
    list[str] | None,
    option("api-key", "Key that clients must send; repeatable, and separated by spaces in the environment."),
]
ApiKeyFile = Annotated[
    str, option("api-key-file", "File with one key a line, or JSON with its name and limits. See docs/operations.md.")
]
CorsOrigins = Annotated[
    list[str] | None, option("cors-origin", "Web origin that may call the API from a browser; repeatable; '*' is any.")
]
ToolCallParserOption = Annotated[
    ToolCallParser,
    option("tool-call-parser", "Format in which the model writes tool calls; auto finds it in the chat template."),
]
ReasoningParserOption = Annotated[
    ReasoningParser,
    option("reasoning-parser", "Splits <think>...</think> off the text; auto does where the chat template has it."),
]
TrustRequestChatTemplate = Annotated[
    bool, switch("trust-request-chat-template", "Honour the chat_template of requests: it is a program.")
]
DebugEndpoints = Annotated[bool, switch("debug-endpoints", "Serve /debug/state.")]
DrainTimeout = Annotated[
    float, option("drain-timeout", "Seconds that running streams may take to finish at the end.", min=0)
]
Seed = Annotated[
    int | None,
    option("seed", "Makes the seeds of requests without one repeatable.", min=0, max=2**63 - 1),
]
LogLevelOption = Annotated[LogLevel, option("log-level", "How much to log.")]
LogFormatOption = Annotated[LogFormat, option("log-format", "Lines for people, or one JSON object a line.")]
OtlpEndpoint = Annotated[
    str,
    option(
        "otlp-endpoint",
        "Collector that takes traces over OTLP/HTTP, such as http://localhost:4318; none unless given.",
        variables=("OTEL_EXPORTER_OTLP_ENDPOINT",),
        callback=web_address,
    ),
]
