"""Options that go together, from ``up`` through a service's command to the service itself.

A field is named as its option is (``max_lanes`` is ``--max-lanes``) and, unless its command says otherwise, as the
service names it. ``tools.command`` puts groups on commands, ``tools.processes`` on the command lines of children.
"""

from dataclasses import dataclass, field

from tools import options as o


@dataclass(frozen=True)
class Compute:
    """How an executor computes."""

    device: o.DeviceOption = "auto"
    dtype: o.DtypeOption = "auto"
    quantization: o.QuantizationOption = "none"


@dataclass(frozen=True)
class Size:
    """What an executor holds."""

    block_size: o.BlockSize = 16
    num_blocks: o.NumBlocks = None
    kv_memory: o.KvMemory = None
    max_lanes: o.MaxLanes = 64
    max_step_tokens: o.MaxStepTokens = 512
    max_model_len: o.MaxModelLen = None


@dataclass(frozen=True)
class Steps:
    """How the scheduler composes steps."""

    policy: o.PolicyOption = "continuous"
    static_batch_size: o.StaticBatchSize = 8
    static_wait_ms: o.StaticWaitMs = 100
    max_inflight: o.MaxInflight = 2


@dataclass(frozen=True)
class Queue:
    """Who waits, how long, and what is shared."""

    max_queue: o.MaxQueue = None
    max_queue_tokens: o.MaxQueueTokens = None
    ttft_limit_ms: o.TtftLimitMs = None
    ageing_ms: o.AgeingMs = 10_000
    tenant_weight: o.TenantWeights = None
    prefix_cache: o.PrefixCache = "on"


@dataclass(frozen=True)
class Journal:
    """What the scheduler writes down."""

    journal: o.Journal = ""
    journal_redact: o.JournalRedact = False


@dataclass(frozen=True)
class Access:
    """Who may ask a gateway."""

    api_key: o.ApiKeys = field(default=None, repr=False)
    api_key_file: o.ApiKeyFile = ""
    cors_origin: o.CorsOrigins = None


@dataclass(frozen=True)
class Http:
    """How a gateway answers."""

    ssl_certfile: o.SslCertfile = ""
    ssl_keyfile: o.SslKeyfile = ""
    ssl_keyfile_password: o.SslKeyfilePassword = field(default="", repr=False)
    tool_call_parser: o.ToolCallParserOption = "auto"
    reasoning_parser: o.ReasoningParserOption = "auto"
    trust_request_chat_template: o.TrustRequestChatTemplate = False
    debug_endpoints: o.DebugEndpoints = False


@dataclass(frozen=True)
class Logging:
    """What every process tells."""

    log_level: o.LogLevelOption = "info"
    log_format: o.LogFormatOption = "text"
    otlp_endpoint: o.OtlpEndpoint = ""
