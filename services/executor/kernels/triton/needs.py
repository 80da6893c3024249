"""What Triton needs of a machine to run these kernels. Called before triton is imported, so it imports none of it."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def missing(capability: tuple[int, int]) -> str | None:
    """What is missing, in words; None when nothing is. ``capability`` is the CUDA device's compute capability.

    Triton compiles each kernel when it is first used, and with it, by a C compiler, a Python module that launches it.
    """
    if capability < (8, 0):
        return f"a device of compute capability 8.0 or later (this one has {capability[0]}.{capability[1]})"
    if importlib.util.find_spec("triton") is None:
        return "the triton package"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "gcc or clang"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's header files (python3-dev)"
    return None
