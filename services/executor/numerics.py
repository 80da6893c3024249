"""The fingerprint of all that may change a bit of a result. Called by the torch backend while it loads."""

import hashlib
from importlib.metadata import version
from pathlib import Path

from services.executor.model import weights

_LIBRARIES = ("llguidance", "numpy", "torch", "transformers")
_OWN_CODE = Path(__file__).parent


def fingerprint(folder: Path, *settings: object) -> str:
    """16 hex digits of the model in ``folder``, ``settings`` (kernels, say), the libraries' versions and our own code.

    Any change of our code counts: few of them move a bit, and nothing tells which.
    """
    state = hashlib.sha256(repr((settings, [version(name) for name in _LIBRARIES])).encode())
    state.update(weights.digest(weights.weight_files(folder)).encode())
    for file in (folder / "config.json", *sorted(_OWN_CODE.rglob("*.py"))):
        state.update(hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest()[:16]
