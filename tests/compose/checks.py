"""What the containers must do on a real engine, in order: each check goes on where the one before has left the stack.

Run by tests/compose/run. The default model answers in float32, where its greedy text is the same to the last token
however a stream was moved about.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.compose import engine as engines
from tests.compose.commands import run, say
from tests.compose.stack import USER_ID, Stack
from tests.fakes.waiting import wait_until

PROMPT = "Tell me how a paternoster lift works, and what became of it."
OTHER_PROMPT = "List the planets and say something about each."
TOKENS = 160


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The project, its images built; everything is gone afterwards."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a CI out of time: still take everything down
    project = f"paternoster-check-{os.getpid()}"
    with engines.engine() as env:
        compose = engines.compose_command(env)
        base = engines.base_image(env, f"paternoster-base:{project}")
        stack = Stack(project, env | engines.builder_settings(env) | {"BASE_IMAGE": base}, compose)
        try:
            say("filling wheels/")
            run([sys.executable, "-m", "tools.wheels", "fill"], timeout_s=600)
            for service in ("scheduler", "gateway", "model", "executor"):
                say(f"building the image of {service}")
                stack.compose("build", service, timeout_s=600)
            yield stack
        finally:
            say("taking everything down")
            stack.remove()
            if base != engines.BASE_IMAGE:
                stack.docker("image", "rm", base)
        assert stack.leftovers() == []


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> dict[str, str]:
    """The texts that the prompts get when nothing happens on the way."""
    return {prompt: stack.chat(prompt, TOKENS) for prompt in (PROMPT, OTHER_PROMPT)}


def test_images_of_gateway_and_scheduler_are_small_and_hold_no_torch(stack: Stack) -> None:
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)"
    megabytes = {}
    for service in ("scheduler", "gateway", "executor"):
        size = stack.docker("image", "inspect", "--format={{.Size}}", stack.image(service))
        megabytes[service] = int(size) // 10**6
        if service != "executor":
            stack.docker("run", "--rm", "--network=none", "--entrypoint=python3", stack.image(service), "-c", look)
    say(f"sizes in MB: {megabytes}")
    assert megabytes["scheduler"] < 250
    assert megabytes["gateway"] < 600


def test_two_executors_join_and_every_container_is_healthy(stack: Stack) -> None:
    say("up with two executors")
    stack.compose("up", "--detach", "--scale", "executor=2", timeout_s=300)
    stack.wait_ready(executors=2, timeout_s=180)
    containers = [found for service in ("gateway", "scheduler", "executor") for found in stack.containers(service)]
    assert len(containers) == 4
    wait_until(lambda: all(stack.is_healthy(container) for container in containers), 60, "all healthy", 0.5)
    for container in containers:
        assert stack.docker("exec", container, "id", "--user").strip() == USER_ID
    assert "plain torch kernels" not in stack.logs(), "the executor's image lacks the compiled kernels"


def test_only_the_gateway_can_be_reached_from_the_host(stack: Stack) -> None:
    for service in ("scheduler", "executor"):
        for container in stack.containers(service):
            assert stack.docker("port", container) == ""
    assert stack.docker("port", *stack.containers("gateway")).strip().endswith(f"127.0.0.1:{stack.port}")


def test_a_stream_survives_the_crash_of_its_executor_which_comes_back(
    stack: Stack, undisturbed: dict[str, str]
) -> None:
    crashed = []

    def crash_carrier() -> None:
        crashed.append(stack.carrier())
        say(f"crashing executor {crashed[0][:12]} in the middle of a stream")
        stack.crash(crashed[0])

    assert stack.chat(PROMPT, TOKENS, {20: crash_carrier}) == undisturbed[PROMPT]
    stack.wait_ready(executors=2, timeout_s=120)
    assert stack.inspect(crashed[0], "RestartCount") == "1"


def test_scaling_down_and_up_disturbs_no_stream(stack: Stack, undisturbed: dict[str, str]) -> None:
    for executors in (1, 2):
        texts: dict[str, str] = {}
        begun = threading.Barrier(3, timeout=120)

        def stream(prompt: str, texts: dict[str, str] = texts, begun: threading.Barrier = begun) -> None:
            texts[prompt] = stack.chat(prompt, TOKENS, {10: begun.wait})

        threads = [threading.Thread(target=stream, args=[prompt]) for prompt in undisturbed]
        for thread in threads:
            thread.start()
        begun.wait()
        say(f"scaling to {executors} under two streams")
        stack.compose("up", "--detach", "--scale", f"executor={executors}")
        for thread in threads:
            thread.join(120)
        assert texts == undisturbed
        stack.wait_ready(executors=executors, timeout_s=120)


def test_stopping_lets_a_stream_finish_and_every_process_leaves_by_itself(
    stack: Stack, undisturbed: dict[str, str]
) -> None:
    stopping = threading.Thread(target=stack.compose, args=["stop"])
    say("stopping in the middle of a stream")
    assert stack.chat(PROMPT, TOKENS, {20: stopping.start}) == undisturbed[PROMPT]
    stopping.join(120)
    for service in ("gateway", "scheduler", "executor"):
        for container in stack.containers(service):
            assert stack.inspect(container, "State.ExitCode") == "0", f"{service}\n{stack.logs()}"
