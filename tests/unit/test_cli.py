"""The command line as a user meets it. What each service does with its options is the service's own test."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tools import main as cli
from tools import options, services
from tools.processes import UpOptions

ROOT = Path(__file__).resolve().parents[2]


def paternoster(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.main", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PATERNOSTER_")} | env,
        capture_output=True,
        text=True,
        timeout=100,
    )


def one_error_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    return line.removeprefix("paternoster: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--backend", "magic"], "'magic' is not one of 'torch', 'fake'"),
        (["up", "--executors", "0"], "--executors"),
        (["up", "--port", "70000"], "--port"),
        (["up", "--kv-memory", "lots"], "'lots' is not a number of bytes such as 4G or 512MiB"),
        (["up", "--exekutors", "2"], "No such option: --exekutors"),
        (["up", "--api-key-file", "/no/such/file"], "cannot read /no/such/file"),
        (["up", "--api-key", "two words"], "a key must be printable ASCII without spaces"),
        (["up", "--api-key-file", __file__], "line 1: a key must be printable ASCII without spaces"),
        (["executor", "--backend=fake", "--curve-secret-file", "k"], "it takes both this and --curve-scheduler-file"),
        (["scheduler", "--curve-clients", "k"], "it takes both this and --curve-clients"),
        (["scheduler", "--curve-clients", "k", "--curve-secret-file", "/no/such"], "/no/such"),
        (["down"], "No such command 'down'"),
        (["executor", "--model", "/no/such/folder"], "'/no/such/folder' is not a model folder"),
        (["bench", "serve", "--prompt-tokens", "9:3"], "'9:3' must hold whole numbers"),
        (["bench", "serve", "--json", "/no/such/file"], "/no/such/file cannot be written"),
        (["simulate", "--json", "/no/such/file"], "/no/such/file cannot be written"),
        (["simulate", "--json", "/tmp"], "/tmp cannot be written"),
        (["up", "--journal", "/no/such/file"], "/no/such/file cannot be written"),
        (["simulate", "--picture", "/no/such/file"], "/no/such/file cannot be written"),
        (["simulate", "--trace", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["simulate", "--fit", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["replay", "any", "--picture", "/no/such/file"], "/no/such/file cannot be written"),
        (["up", "--api-key-file", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["up", "--ssl-certfile", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["up", "--ssl-certfile", __file__], f"cannot serve HTTPS with {__file__}: "),
        (["up", "--ssl-keyfile", __file__], "it takes both this and --ssl-certfile"),
        (["executor"], "a model folder is needed; 'paternoster model fetch REF DIR' fills one"),
        (["gateway", "--model", "/none"], "'/none' is not a model folder; 'paternoster model fetch REF DIR' fills one"),
        (["model", "fetch"], "Missing argument"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert message in one_error_line(paternoster(*arguments))


@pytest.mark.parametrize("arguments", [[], ["bench"], ["model"]])
def test_a_command_that_is_none_yet_shows_what_there_is_one_line_each(arguments: list[str]) -> None:
    result = paternoster(*arguments)
    assert result.returncode == 2
    _, _, commands = result.stderr.partition("Commands:\n")
    assert commands == paternoster(*arguments, "--help").stdout.partition("Commands:\n")[2]
    assert commands
    assert "..." not in commands


def test_an_environment_variable_is_checked_as_the_option_is() -> None:
    assert "--max-lanes" in one_error_line(paternoster("up", PATERNOSTER_MAX_LANES="many"))


def test_an_unknown_variable_stops_every_command() -> None:
    for command in (["up"], ["bench", "serve"], ["--help"]):
        line = one_error_line(paternoster(*command, PATERNOSTER_EXECUTERS="2"))
        assert line == "unknown environment variable PATERNOSTER_EXECUTERS; did you mean PATERNOSTER_EXECUTORS?"


def test_a_command_imports_no_service_but_its_own() -> None:
    code = (
        "import sys; from tools import main\n"
        "heavy = ('services.', 'torch', 'transformers', 'zmq', 'starlette')\n"
        "assert not [name for name in sys.modules if name.startswith(heavy)]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=100)


def up_options(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> UpOptions:
    """What ``up`` makes of its arguments."""
    seen: list[UpOptions] = []

    def run(up: UpOptions) -> int:
        seen.append(up)
        return 0

    monkeypatch.setattr("tools.up.run", run)
    monkeypatch.setattr("sys.argv", ["paternoster", "up", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    return seen[0]


def test_options_and_variables_become_the_options_of_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# staff\nsk-three\n\nsk-one\n")
    monkeypatch.setenv("PATERNOSTER_EXECUTORS", "3")
    monkeypatch.setenv("PATERNOSTER_API_KEY", "sk-one sk-two")
    monkeypatch.setenv("PATERNOSTER_DEBUG_ENDPOINTS", "true")
    up = up_options(monkeypatch, "--kv-memory=1.5GiB", f"--api-key-file={keys}", "--metrics-port=0", "--cors-origin=*")
    assert (up.executors, up.size.kv_memory, up.metrics_port) == (3, 3 * 2**29, 0)
    assert (up.access.api_key, up.access.api_key_file) == (["sk-one", "sk-two"], str(keys))
    assert (up.http.debug_endpoints, up.access.cors_origin, up.backend, up.port) == (True, ["*"], "torch", 8000)


def test_an_option_outranks_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATERNOSTER_PORT", "9000")
    assert up_options(monkeypatch, "--port=9001").port == 9001


def test_a_fetch_that_is_told_to_stop_clears_up() -> None:
    code = """
import sys, time
from tools import main, model
def slow(ref, report):
    try:
        report("fetching")
        time.sleep(60)
    finally:
        print("cleared up", flush=True)
model.cached = slow
sys.argv = ["paternoster", "model", "fetch", "default"]
main.main()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "fetching\n"
        process.terminate()
        assert process.stdout.read() == "cleared up\n"
        assert process.wait(10) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("4G", 4 * 2**30), ("512MiB", 2**29), ("1.5k", 1536), ("2 gb", 2**31), ("1T", 2**40)]
)
def test_bytes(text: str, count: int) -> None:
    assert options.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "G", "-1", "4X", "0", "0.0001", "1e9"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        options.parse_bytes(text)


def visible_options() -> dict[str, Any]:
    command: Any = typer.main.get_command(cli.app)
    return {f"--{each.name.replace('_', '-')}": each for each in command.commands["up"].params if not each.hidden}


def test_every_option_has_its_variable_and_a_help() -> None:
    for name, parameter in visible_options().items():
        if name != "--help":
            first = parameter.envvar if isinstance(parameter.envvar, str) else parameter.envvar[0]
            assert first == "PATERNOSTER_" + name[2:].upper().replace("-", "_"), name
            assert parameter.help, name


def test_the_readme_lists_the_options_of_up_as_the_help_does() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \| (.*?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [(name, default, text) for name, default, text in rows] == [
        (name, readme_default(parameter), parameter.help)
        for name, parameter in visible_options().items()
        if name != "--help"
    ]


def readme_default(parameter: Any) -> str:
    """The default as the README's table shows it."""
    value = parameter.default
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


@pytest.mark.parametrize("weight", ["gold", "gold=", "gold=0", "gold=-1", "gold=nan", "=2", "gold=inf"])
def test_a_weight_that_makes_no_sense_is_refused(weight: str) -> None:
    with pytest.raises(typer.BadParameter, match="WEIGHT"):
        services.tenant_weights([weight])


def test_weights_by_tenant() -> None:
    assert services.tenant_weights(["gold=2.5", "a=b=1", "gold=3"]) == {"gold": 3.0, "a=b": 1.0}
    assert services.tenant_weights(None) == {}
