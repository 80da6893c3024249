"""A Docker engine to test on: the one that runs here, else one installed from the system's packages and started.

An engine of our own keeps everything in a temporary folder and is stopped at the end, the network put back as it was.
Called by checks.py.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.compose.commands import as_root, run, say, succeeds
from tests.fakes.waiting import wait_until

BASE_IMAGE = "debian:bookworm-slim"
_RELEASE = "bookworm"
_PR_SET_PDEATHSIG = 1
_NOT_NEEDED = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
)
_OWN_MOUNTS = ("unshare", "--mount")
"""Runs a program whose mounts no other program sees, so that removing its folder cannot reach through one."""
_FORWARDING = ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding")


@contextlib.contextmanager
def engine() -> Iterator[dict[str, str]]:
    """Yield the environment in which ``docker`` reaches an engine. Fails where none runs and none can be started."""
    env = dict(os.environ)
    if not succeeds(["docker", "info"], env=env):
        _install({"dockerd": "docker.io", "iptables": "iptables", "ip": "iproute2"})
        _install({"docker": "docker-cli"})  # newer releases of docker.io come without the client
    if succeeds(["docker", "info"], env=env):
        say("using the Docker engine that runs here")
        yield env
        return
    assert as_root(), "no Docker engine runs here, and starting one needs root (SKIP_COMPOSE=1 leaves these checks out)"
    with tempfile.TemporaryDirectory(prefix="paternoster-docker-") as folder, _network_put_back():
        env["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
        with _dockerd(Path(folder), env):
            yield env


def compose_command(env: Mapping[str, str]) -> list[str]:
    """``docker compose`` where that plugin is there, else ``docker-compose``, installed if need be."""
    if succeeds(["docker", "compose", "version"], env=env):
        return ["docker", "compose"]
    _install({"docker-compose": "docker-compose"})
    return ["docker-compose"]


def builder_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that choose the classic builder where the client has no other."""
    if succeeds(["docker", "buildx", "version"], env=env):
        return {}
    return {"DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}


def base_image(env: Mapping[str, str], own_name: str) -> str:
    """Name of an image with Debian to build on: the usual one if it can be had, else ``own_name``, made here."""
    inspect = ["docker", "image", "inspect", BASE_IMAGE]
    if succeeds(inspect, env=env) or succeeds(["docker", "pull", "--quiet", BASE_IMAGE], timeout_s=180, env=env):
        return BASE_IMAGE
    say(f"{BASE_IMAGE} cannot be pulled: making {own_name} from Debian's packages")
    assert as_root(), f"{BASE_IMAGE} cannot be pulled, and making it needs root"
    _install({"debootstrap": "debootstrap"})
    with tempfile.TemporaryDirectory(prefix="paternoster-base-") as folder:
        _debootstrap(Path(folder))
        tar = subprocess.Popen(["tar", "--create", f"--directory={folder}", "."], stdout=subprocess.PIPE)
        with tar:
            load = ["docker", "import", "-", own_name]
            subprocess.run(load, stdin=tar.stdout, stdout=subprocess.DEVNULL, env=env, check=True)
        assert tar.returncode == 0, "tar could not read the base image's folder"
    return own_name


def _install(wanted: Mapping[str, str]) -> None:
    """Install the packages (values) of the programs (keys) that are not there."""
    packages = sorted({package for program, package in wanted.items() if shutil.which(program) is None})
    if not packages:
        return
    say(f"installing {', '.join(packages)}")
    assert as_root(), f"{', '.join(packages)} must be installed, which needs root"
    assert shutil.which("apt-get"), f"{', '.join(packages)} must be installed, and this system has no apt-get"
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-q"], timeout_s=180, env=env)
    run(["apt-get", "install", "-q", "--yes", "--no-install-recommends", *packages], timeout_s=600, env=env)


@contextlib.contextmanager
def _dockerd(folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    log = folder / "dockerd.log"
    command = [*_OWN_MOUNTS, "dockerd", f"--host={env['DOCKER_HOST']}", f"--pidfile={folder}/pid"]
    command += [f"--data-root={folder}/data", f"--exec-root={folder}/exec"]
    with log.open("wb") as output:
        # It must not outlive us: it dies, and its containers with it, with the thread that starts it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C is for us alone: the containers are taken down first
            preexec_fn=_stopped_with_parent,
        )
    try:
        try:
            wait_until(
                lambda: process.poll() is not None or succeeds(["docker", "info"], env=env), 60, "dockerd ready", 0.3
            )
            assert process.poll() is None, f"dockerd ended with code {process.returncode}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log.read_text()[-6000:]}") from None
        driver = run(["docker", "info", "--format", "{{.ServerVersion}}, storage {{.Driver}}"], env=env)
        say(f"started a Docker engine, {driver.strip()}")
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        say("stopped the Docker engine")


def _stopped_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextlib.contextmanager
def _network_put_back() -> Iterator[None]:
    """An engine leaves its bridge, its packet filter rules and forwarding behind: put back what was."""
    tools = [tool for tool in ("iptables", "ip6tables") if shutil.which(tool)]
    rules = {tool: [run([f"{tool}-save", "-t", table]) for table in ("filter", "nat")] for tool in tools}
    switches = {path: path.read_text() for path in map(Path, _FORWARDING) if path.exists()}
    had_bridge = Path("/sys/class/net/docker0").exists()
    try:
        yield
    finally:
        for tool, tables in rules.items():
            subprocess.run([f"{tool}-restore"], input="".join(tables), text=True, check=True)
        for path, value in switches.items():
            if path.read_text() != value:
                path.write_text(value)
        if not had_bridge and Path("/sys/class/net/docker0").exists():
            run(["ip", "link", "delete", "docker0"])


def _debootstrap(folder: Path) -> None:
    """A small Debian with Python in ``folder``, from the mirror that this machine's apt uses."""
    wanted = [f"RELEASE: {_RELEASE}", "IDENTIFIER: Packages", "COMPONENT: main"]
    mirrors = run(["apt-get", "indextargets", "--format", "$(REPO_URI)", *wanted]).split()
    assert mirrors, f"this machine's apt knows no mirror of Debian {_RELEASE}"
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates,python3,python3-venv"]
    # In namespaces that end with it: an interrupted run leaves nothing mounted and nothing running.
    contained = [*_OWN_MOUNTS, "--pid", "--fork", "--kill-child"]
    run([*contained, *command, _RELEASE, str(folder), mirrors[0]], timeout_s=480)
    for path in _NOT_NEEDED:
        for entry in (folder / path).iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if authorities := ssl.get_default_verify_paths().cafile:
        shutil.copyfile(authorities, folder / "etc/ssl/certs/ca-certificates.crt")
