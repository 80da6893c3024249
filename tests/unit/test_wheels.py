"""What the images install: read from pyproject.toml, the same for the host that fills wheels/ and for the builds."""

import pytest

from tools import wheels


def test_an_image_gets_the_distributions_own_dependencies_and_its_services() -> None:
    assert {"pyzmq", "starlette"} <= set(wheels.requirements("gateway"))
    assert {"pyzmq", "torch", "opentelemetry-sdk"} <= set(wheels.requirements("executor"))


@pytest.mark.parametrize("service", ["gateway", "scheduler"])
def test_gateway_and_scheduler_get_no_torch(service: str) -> None:
    assert "torch" not in wheels.requirements(service)


def test_triton_is_left_to_torch() -> None:
    assert not [line for line in wheels.requirements("executor") if line.startswith("triton")]


def test_list_prints_one_requirement_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert wheels.main(["list", "scheduler"]) == 0
    assert capsys.readouterr().out.splitlines() == wheels.requirements("scheduler")


def test_anything_else_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert wheels.main(["empty"]) == 2
    assert "usage" in capsys.readouterr().err
