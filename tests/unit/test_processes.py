import dataclasses
import socket
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from tools.child import ChildSpec
from tools.ports import LinkPorts, PortError, check_distinct
from tools.processes import UpOptions, asked_ports, child_specs, children_environment, metrics_ports, served_name

OPTIONS = UpOptions(
    host="127.0.0.1",
    port=0,
    gateways=2,
    executors=2,
    model="default",
    served_model_name="",
    device="auto",
    dtype="auto",
    quantization="none",
    backend="torch",
    policy="continuous",
    static_batch_size=8,
    static_wait_ms=100,
    max_inflight=2,
    block_size=16,
    num_blocks=None,
    kv_memory=None,
    max_lanes=64,
    max_step_tokens=512,
    max_model_len=None,
    max_queue=None,
    max_queue_tokens=None,
    ttft_limit_ms=None,
    ageing_ms=10_000,
    tenant_weights={"gold": 2.5},
    prefix_cache="on",
    api_keys=("sk-one", "sk-two"),
    api_key_file="",
    ssl_certfile="",
    ssl_keyfile="",
    ssl_keyfile_password="",
    cors_origins=("https://a", "https://b"),
    debug_endpoints=True,
    log_level="info",
    log_format="json",
    otlp_endpoint="http://c:4318",
    drain_timeout_s=30,
    recovery_timeout_s=60,
    step_timeout_s=60,
    journal="",
    journal_redact=False,
    tool_call_parser="auto",
    reasoning_parser="auto",
    trust_request_chat_template=False,
    seed=None,
    threads=None,
    link_port=0,
    metrics_port=9101,
)


@pytest.fixture
def http() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def specs(http: socket.socket, **changes: Any) -> dict[str, ChildSpec]:
    with LinkPorts(0) as links:
        options = dataclasses.replace(OPTIONS, **changes)
        return {spec.name: spec for spec in child_specs(options, "/models/m", http, links)}


def flags(spec: ChildSpec) -> dict[str, str]:
    return dict(argument[2:].split("=", 1) for argument in spec.argv if argument.startswith("--") and "=" in argument)


def test_the_processes_and_their_ports(http: socket.socket) -> None:
    children = specs(http)
    assert list(children) == ["scheduler", "executor-0", "executor-1", "gateway-0", "gateway-1"]
    assert [flags(spec)["metrics-port"] for spec in children.values()] == ["9101", "9102", "9103", "9201", "9202"]
    assert metrics_ports(OPTIONS) == [9101, 9102, 9103, 9201, 9202]
    scheduler = flags(children["scheduler"])
    assert flags(children["gateway-1"])["scheduler"] == scheduler["gateways-endpoint"]
    assert flags(children["executor-1"])["scheduler"] == scheduler["executors-endpoint"]


def test_every_gateway_inherits_the_one_listening_socket(http: socket.socket) -> None:
    for name in ("gateway-0", "gateway-1"):
        spec = specs(http)[name]
        assert list(spec.pass_fds) == [http.fileno()]
        assert flags(spec)["fd"] == str(http.fileno())


def test_keys_are_in_the_environment_and_on_no_command_line(http: socket.socket) -> None:
    children = specs(http)
    assert not any("sk-" in argument for spec in children.values() for argument in spec.argv)
    assert {name for name, spec in children.items() if spec.extra_env} == {"gateway-0", "gateway-1"}
    assert children["gateway-0"].extra_env == {"PATERNOSTER_API_KEY": "sk-one sk-two"}
    assert not specs(http, api_keys=())["gateway-0"].extra_env


def test_executors_share_the_cores_unless_told_otherwise(http: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    assert [flags(specs(http, executors=n)["executor-0"])["threads"] for n in (2, 4, 9)] == ["3", "1", "1"]
    assert "threads" not in flags(specs(http, executors=1)["executor-0"])
    assert flags(specs(http, threads=5)["executor-1"])["threads"] == "5"


def test_no_metrics_ports(http: socket.socket) -> None:
    assert {flags(spec)["metrics-port"] for spec in specs(http, metrics_port=None).values()} == {"0"}
    assert metrics_ports(dataclasses.replace(OPTIONS, metrics_port=None)) == []


def test_every_option_of_up_reaches_some_child(http: socket.socket) -> None:
    """An option that is offered and goes nowhere would be a lie."""
    for_up_itself = {"gateways", "executors", "link_port", "host", "port", "model", "debug_endpoints"}
    changed: dict[str, Any] = {}
    for each in fields(UpOptions):
        if each.name in for_up_itself:
            continue
        if each.name == "api_keys":
            changed[each.name] = ("sk-new",)
        elif each.name == "cors_origins":
            changed[each.name] = ("https://new",)
        elif each.name == "tenant_weights":
            changed[each.name] = {"new": 1.0}
        elif "str" in str(each.type):
            changed[each.name] = "new"
        else:
            changed[each.name] = 7
    before = specs(http)
    for name, value in changed.items():
        after = specs(http, **{name: value})
        said = [(spec.argv, dict(spec.extra_env)) for spec in after.values()]
        assert any("new" in str(each) or "7" in str(each) for each in said), name
        assert {n: [a for a in s.argv if "tcp" not in a] for n, s in after.items()} != {
            n: [a for a in s.argv if "tcp" not in a] for n, s in before.items()
        } or after["gateway-0"].extra_env != before["gateway-0"].extra_env, name


def test_the_served_name() -> None:
    assert served_name(OPTIONS) == "SmolLM2-135M-Instruct"
    assert served_name(dataclasses.replace(OPTIONS, model="org/Name-1B")) == "Name-1B"
    assert served_name(dataclasses.replace(OPTIONS, backend="fake")) == "fake"
    assert served_name(dataclasses.replace(OPTIONS, served_model_name="mine")) == "mine"


def test_children_get_no_options_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATERNOSTER_PORT", "1")
    monkeypatch.setenv("PATERNOSTER_FAULTS", "{}")
    ours = {name for name in children_environment() if name.startswith("PATERNOSTER_")}
    assert ours == {"PATERNOSTER_FAULTS"}


def test_the_journal_is_the_schedulers_and_its_path_does_not_depend_on_the_folder(http: socket.socket) -> None:
    children = specs(http, journal="a.journal", journal_redact=True)
    path = flags(children["scheduler"])["journal"]
    assert path.startswith("/")
    assert path.endswith("/a.journal")
    assert [name for name, spec in children.items() if "--journal-redact" in spec.argv] == ["scheduler"]


@pytest.mark.parametrize(
    ("port", "link_port", "metrics_port", "named"),
    [
        (9101, 5701, 9101, "--port and --metrics-port"),
        (5702, 5701, None, "--port and --link-port"),
        (8000, 9101, 9100, "--link-port and --metrics-port"),
        (8000, 9104, 9102, "--link-port and --metrics-port"),
    ],
)
def test_options_that_took_the_same_port_were_told_that_it_is_in_use(
    port: int, link_port: int, metrics_port: int | None, named: str
) -> None:
    options = dataclasses.replace(
        OPTIONS, executors=3, port=port, link_port=link_port, metrics_port=metrics_port, gateways=2
    )
    with pytest.raises(PortError, match=named):
        check_distinct(asked_ports(options))
    check_distinct(asked_ports(dataclasses.replace(OPTIONS, port=0, link_port=0, metrics_port=None)))
    check_distinct(asked_ports(OPTIONS))
