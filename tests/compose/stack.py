"""The system as ``docker compose`` runs it: its containers, what it says of itself, and streams through its port.

Called by checks.py. Every name carries the project's, so that nothing of the machine's own is touched.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import openai

from tests.compose.commands import run, succeeds
from tests.fakes.waiting import wait_until

USER_ID = "10001"
_LABEL = "com.docker.compose"


class Stack:
    """One compose project. ``env`` reaches the engine and builds the images; ``compose`` is the command to use."""

    def __init__(self, project: str, env: Mapping[str, str], compose: Sequence[str]) -> None:
        self.project = project
        self.port = _free_port()
        self.env = {name: value for name, value in env.items() if not name.startswith("PATERNOSTER_")} | {
            "IMAGE_TAG": project,
            "PATERNOSTER_PORT": str(self.port),
            "PATERNOSTER_DTYPE": "float32",
            "PATERNOSTER_THREADS": "1",
            "PATERNOSTER_DEBUG_ENDPOINTS": "1",
        }
        self._compose = [*compose, "--project-name", project, "--file", "compose.yaml"]
        self._client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run one ``docker compose`` command on the project."""
        return run([*self._compose, *arguments], timeout_s=timeout_s, env=self.env)

    def docker(self, *arguments: str, timeout_s: float = 60) -> str:
        """Run one ``docker`` command."""
        return run(["docker", *arguments], timeout_s=timeout_s, env=self.env)

    def image(self, service: str) -> str:
        """The name of a service's image."""
        return f"paternoster-{service}:{self.project}"

    def containers(self, service: str) -> list[str]:
        """Ids, in full, of the containers of a service, stopped ones included."""
        labels = [f"--filter=label={_LABEL}.project={self.project}", f"--filter=label={_LABEL}.service={service}"]
        return self.docker("ps", "--all", "--no-trunc", "--quiet", *labels).split()

    def inspect(self, container: str, field: str) -> str:
        """A field of ``docker inspect``, such as ``State.Pid``."""
        return self.docker("inspect", f"--format={{{{.{field}}}}}", container).strip()

    def is_healthy(self, container: str) -> bool:
        """Whether the container's own health check says so."""
        return self.inspect(container, "State.Health.Status") == "healthy"

    def state(self) -> dict[str, Any]:
        """What ``/debug/state`` says."""
        state: dict[str, Any] = httpx.get(f"http://127.0.0.1:{self.port}/debug/state", timeout=10).json()
        return state

    def executors(self) -> list[dict[str, Any]]:
        """The executors that the scheduler knows; none while the gateway cannot say."""
        try:
            executors: list[dict[str, Any]] = self.state()["scheduler"]["executors"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []
        return executors

    def wait_ready(self, executors: int, timeout_s: float) -> None:
        """Return once requests can be served and exactly so many executors have joined."""
        try:
            wait_until(lambda: self._is_ready() and len(self.executors()) == executors, timeout_s, "ready", 0.3)
        except AssertionError as error:
            raise AssertionError(f"{error} with {executors} executors\n{self.logs()}") from None

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def carrier(self) -> str:
        """The container of the one executor that carries a stream just now: its id is its host name, and its name."""
        busy = [executor["id"] for executor in self.executors() if executor["lanes"]["used"]]
        assert len(busy) == 1, f"one stream on {busy}"
        (container,) = [found for found in self.containers("executor") if found[:12] in busy[0]]
        return container

    def crash(self, container: str) -> None:
        """SIGKILL the container's first process from outside, as the kernel does when memory is short.

        Not ``docker kill``: that counts as a wish, and the engine would not start the container again.
        """
        kill = f"import os; os.kill({self.inspect(container, 'State.Pid')}, 9)"
        outside = ["--pid=host", "--user=0", "--network=none", "--entrypoint=python3"]
        self.docker("run", "--rm", *outside, self.image("executor"), "-c", kill)

    def chat(self, prompt: str, tokens: int, at_chunk: Mapping[int, Callable[[], object]] | None = None) -> str:
        """Stream so many tokens of a greedy answer and return its text; call what ``at_chunk`` says on the way."""
        text = ""
        finish = None
        with self._client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
            timeout=120,
        ) as stream:
            for number, chunk in enumerate(stream):
                if at_chunk and number in at_chunk:
                    at_chunk[number]()
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    finish = choice.finish_reason or finish
        assert finish == "length", f"the stream ended with {finish!r} after {text!r}\n{self.logs()}"
        return text

    def logs(self) -> str:
        """The last lines of every container."""
        return self.compose("logs", "--no-color", "--tail=40")

    def remove(self) -> None:
        """Take down whatever is there, images included."""
        self.compose("down", "--volumes", "--remove-orphans", "--rmi", "all", timeout_s=180)

    def leftovers(self) -> list[str]:
        """Containers, volumes, networks and images that carry the project's name."""
        found = []
        for kind in ("container", "volume", "network"):
            every = ["--all"] if kind == "container" else []
            label = f"--filter=label={_LABEL}.project={self.project}"
            found += [f"{kind} {name}" for name in self.docker(kind, "ls", "--quiet", label, *every).split()]
        services = ("model", "gateway", "scheduler", "executor")
        present = [s for s in services if succeeds(["docker", "image", "inspect", self.image(s)], env=self.env)]
        return found + [f"image {self.image(service)}" for service in present]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
