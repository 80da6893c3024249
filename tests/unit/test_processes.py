import socket
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from tools.child import ChildSpec
from tools.option_groups import Access, Compute, Http, Journal, Logging, Queue, Size, Steps
from tools.ports import LinkPorts, PortError, check_distinct
from tools.processes import UpOptions, asked_ports, child_specs, children_environment, metrics_ports, served_name

OPTIONS = UpOptions(
    port=0,
    gateways=2,
    executors=2,
    compute=Compute(),
    steps=Steps(),
    size=Size(),
    queue=Queue(tenant_weight=["gold=2.5"]),
    access=Access(api_key=["sk-one", "sk-two"], cors_origin=["https://a", "https://b"]),
    http=Http(debug_endpoints=True),
    logging=Logging(log_format="json", otlp_endpoint="http://c:4318"),
    journal=Journal(),
    link_port=0,
)


def changed(options: Any, changes: dict[str, Any]) -> Any:
    """With other values of options, wherever they are."""
    now: dict[str, Any] = {}
    for each in fields(options):
        value = getattr(options, each.name)
        now[each.name] = changed(value, changes) if is_dataclass(value) else changes.get(each.name, value)
    return type(options)(**now)


def names_of(options: Any) -> Iterator[tuple[str, str]]:
    """Each option and its type."""
    for each in fields(options):
        value = getattr(options, each.name)
        if is_dataclass(value):
            yield from names_of(value)
        else:
            yield each.name, str(each.type)


@pytest.fixture
def http() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def specs(http: socket.socket, **changes: Any) -> dict[str, ChildSpec]:
    with LinkPorts(0) as links:
        return {spec.name: spec for spec in child_specs(changed(OPTIONS, changes), "/models/m", http, links)}


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
    assert not specs(http, api_key=None)["gateway-0"].extra_env


def test_executors_share_the_cores_unless_told_otherwise(http: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    assert [flags(specs(http, executors=n)["executor-0"])["threads"] for n in (2, 4, 9)] == ["3", "1", "1"]
    assert "threads" not in flags(specs(http, executors=1)["executor-0"])
    assert flags(specs(http, threads=5)["executor-1"])["threads"] == "5"


def test_no_metrics_ports(http: socket.socket) -> None:
    assert {flags(spec)["metrics-port"] for spec in specs(http, metrics_port=0).values()} == {"0"}
    assert metrics_ports(changed(OPTIONS, {"metrics_port": 0})) == []


def test_every_option_of_up_reaches_some_child(http: socket.socket) -> None:
    """An option that is offered and goes nowhere would be a lie."""
    for_up_itself = {"gateways", "executors", "link_port", "host", "port", "model", "debug_endpoints"}
    values: dict[str, Any] = {"tenant_weight": ["new=1"]}
    for name, kind in names_of(OPTIONS):
        if name in for_up_itself or name in values:
            continue
        if "list[str]" in kind:
            values[name] = ["new"]
        elif "bool" in kind:
            values[name] = True
        else:
            values[name] = "new" if "str" in kind or "Literal" in kind else 7
    before = specs(http)
    for name, value in values.items():
        after = specs(http, **{name: value})
        said = [(spec.argv, dict(spec.extra_env)) for spec in after.values()]
        assert any("new" in str(each) or "7" in str(each) or value is True for each in said), name
        assert {n: [a for a in s.argv if "tcp" not in a] for n, s in after.items()} != {
            n: [a for a in s.argv if "tcp" not in a] for n, s in before.items()
        } or after["gateway-0"].extra_env != before["gateway-0"].extra_env, name


def test_the_served_name() -> None:
    assert served_name(OPTIONS) == "SmolLM2-135M-Instruct"
    assert served_name(changed(OPTIONS, {"model": "org/Name-1B"})) == "Name-1B"
    assert served_name(changed(OPTIONS, {"backend": "fake"})) == "fake"
    assert served_name(changed(OPTIONS, {"served_model_name": "mine"})) == "mine"


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
        (5702, 5701, 0, "--port and --link-port"),
        (8000, 9101, 9100, "--link-port and --metrics-port"),
        (8000, 9104, 9102, "--link-port and --metrics-port"),
    ],
)
def test_options_that_took_the_same_port_were_told_that_it_is_in_use(
    port: int, link_port: int, metrics_port: int, named: str
) -> None:
    options = replace(OPTIONS, executors=3, port=port, link_port=link_port, metrics_port=metrics_port, gateways=2)
    with pytest.raises(PortError, match=named):
        check_distinct(asked_ports(options))
    check_distinct(asked_ports(replace(OPTIONS, port=0, link_port=0, metrics_port=0)))
    check_distinct(asked_ports(OPTIONS))
