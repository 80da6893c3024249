"""Keys that options name, read before anything starts: API keys, those of the links between hosts, and HTTPS's.

Called by ``tools.main``; what is wrong with them is the user's mistake (BadParameter), told without a key.
"""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from shared.api_keys import ApiKey, checked, plain_key, read_file
from tools.options import told

if TYPE_CHECKING:  # zmq is for the commands that have links
    from shared.net.curve import PeerKeys, SchedulerKeys

Keys = TypeVar("Keys")


def api_keys(keys: list[str] | None, key_file: str) -> tuple[ApiKey, ...]:
    """Those of the options and of the file, each once. One that is in both is the file's: there it may have a name."""
    try:
        given = [plain_key(key) for key in keys or ()]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--api-key") from None
    try:
        in_file = read_file(Path(key_file)) if key_file else ()
        known = {key.digest for key in in_file}
        return checked([*in_file, *(key for key in given if key.digest not in known)])
    except OSError as error:
        raise typer.BadParameter(told(error), param_hint="--api-key-file") from None
    except ValueError as error:
        raise typer.BadParameter(f"cannot read {key_file}: {error}", param_hint="--api-key-file") from None


def check_certificate(certfile: str, keyfile: str, password: str) -> None:
    """That HTTPS can be served with it: known before a model is loaded, not after. Nothing is served without one."""
    if not certfile and keyfile:
        raise typer.BadParameter("it takes both this and --ssl-certfile", param_hint="--ssl-keyfile")
    if not certfile:
        return
    try:
        for path in filter(None, (certfile, keyfile)):
            Path(path).read_bytes()  # unlike the next error, this one names the file
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile or None, lambda: password)
    except OSError as error:
        told_as = told(error) if error.filename else f"cannot serve HTTPS with {certfile}: {error.strerror or error}"
        raise typer.BadParameter(told_as, param_hint="--ssl-certfile") from None


def peer_keys(secret_file: str, scheduler_file: str) -> "PeerKeys | None":
    """A gateway's or an executor's; None where no keys are named."""
    from shared.net import curve

    return _read(secret_file, scheduler_file, "--curve-scheduler-file", curve.peer_keys)


def scheduler_keys(secret_file: str, clients: str) -> "SchedulerKeys | None":
    """The scheduler's; None where no keys are named."""
    from shared.net import curve

    return _read(secret_file, clients, "--curve-clients", curve.scheduler_keys)


def _read(secret_file: str, other: str, other_option: str, read: Callable[[str, str], Keys]) -> Keys | None:
    if not secret_file and not other:
        return None
    if not secret_file or not other:
        raise typer.BadParameter(f"it takes both this and {other_option}", param_hint="--curve-secret-file")
    try:
        return read(secret_file, other)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(told(error), param_hint="--curve-secret-file") from None
