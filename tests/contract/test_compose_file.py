"""compose.yaml passes on the options that each service has, so that a new one is not forgotten there."""

from pathlib import Path

import pytest
import typer
import yaml

from tools.environment import known_variables
from tools.main import app

IN_THE_IMAGES = {
    "PATERNOSTER_BACKEND",  # the images are made for the real one
    "PATERNOSTER_EXECUTORS_ENDPOINT",
    "PATERNOSTER_FAULTS",
    "PATERNOSTER_GATEWAYS_ENDPOINT",
    "PATERNOSTER_HOST",
    "PATERNOSTER_METRICS_HOST",
    "PATERNOSTER_METRICS_PORT",
    "PATERNOSTER_NAME",  # the container's host name
    "PATERNOSTER_PORT",
}
NOT_IN_A_CONTAINER = {
    "PATERNOSTER_API_KEY_FILE",
    "PATERNOSTER_CURVE_CLIENTS",
    "PATERNOSTER_CURVE_SCHEDULER_FILE",
    "PATERNOSTER_CURVE_SECRET_FILE",
    "PATERNOSTER_FD",
    "PATERNOSTER_SSL_CERTFILE",
    "PATERNOSTER_SSL_KEYFILE",
    "PATERNOSTER_SSL_KEYFILE_PASSWORD",
}
"""Files of the host (docs/containers.md says how they come in), and a socket of a parent process."""


@pytest.mark.parametrize("service", ["gateway", "scheduler", "executor"])
def test_every_option_of_a_service_can_be_set(service: str) -> None:
    root = Path(__file__).parents[2]
    listed = yaml.safe_load((root / "compose.yaml").read_text())["services"][service]["environment"]
    names = {entry.partition("=")[0] for entry in listed}
    command = typer.main.get_command(app).commands[service]  # type: ignore[attr-defined]
    assert names == known_variables(command) - IN_THE_IMAGES - NOT_IN_A_CONTAINER
