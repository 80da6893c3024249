import typer

from tools.environment import complaints, known_variables
from tools.main import app

KNOWN = known_variables(typer.main.get_command(app))


def test_every_command_adds_its_variables() -> None:
    assert {"PATERNOSTER_EXECUTORS", "PATERNOSTER_FD", "PATERNOSTER_RATE", "PATERNOSTER_FAULTS"} <= KNOWN


def test_a_misspelt_variable_is_named_with_the_nearest_known_one() -> None:
    environ = {"PATERNOSTER_EXECUTERS": "2", "PATERNOSTER_PORT": "1", "PATH": "/bin"}
    assert complaints(environ, KNOWN) == [
        "unknown environment variable PATERNOSTER_EXECUTERS; did you mean PATERNOSTER_EXECUTORS?"
    ]


def test_a_variable_like_none_is_named_alone() -> None:
    assert complaints({"PATERNOSTER_XYZZY": ""}, KNOWN) == ["unknown environment variable PATERNOSTER_XYZZY"]
