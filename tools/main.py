"""The ``paternoster`` command and everything below it.

Each command imports what it needs only when it runs: its help needs no service's packages.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from tools import environment, services
from tools import options as o
from tools.bench import command as bench
from tools.command import takes
from tools.keys import api_keys, check_certificate
from tools.processes import UpOptions
from tools.simulator.command import simulate

PROGRAM = "paternoster"
USAGE_ERROR = 2

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Serve language models.\n\nAn option --max-lanes is also the variable PATERNOSTER_MAX_LANES.",
)
model_app = typer.Typer(no_args_is_help=True, help="Prepare a model for serving.")
app.add_typer(model_app, name="model")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point: runs one command; what the user got wrong is one line on stderr and exit code 2."""
    command = typer.main.get_command(app)
    if lines := environment.complaints(os.environ, environment.known_variables(command)):
        _complain(lines)
        sys.exit(USAGE_ERROR)
    try:
        code = command.main(prog_name=PROGRAM, standalone_mode=False)
    except TyperException as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # no command was named: this is the help
            print(message, file=sys.stderr)
        elif message:
            _complain([" ".join(message.split()).replace("Value error, ", "")])
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(130)
    sys.exit(code or 0)


def _complain(lines: list[str]) -> None:
    for line in lines:
        print(f"{PROGRAM}: error: {line}", file=sys.stderr)


@takes(UpOptions)
def up(options: UpOptions) -> int:
    """Start a whole system on this machine and keep it running."""
    from tools.up import run

    # A mistake in what the children will read is told now.
    api_keys(options.access.api_key, options.access.api_key_file)
    check_certificate(options.http.ssl_certfile, options.http.ssl_keyfile, options.http.ssl_keyfile_password)
    services.tenant_weights(options.queue.tenant_weight)
    return run(options)


for command in (up, services.gateway, services.scheduler, services.executor):
    app.command()(command)


@app.command()
def keys(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Folder to fill.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Who gets a pair; 'client' unless given.")
    ] = None,
) -> None:
    """Make keys for links between hosts. Those that exist are kept."""
    from shared.net.curve import make_keys

    try:
        made = make_keys(Path(directory), names or ["client"])
    except OSError as error:
        raise TyperException(f"cannot write keys: {error}") from error
    for path in made:
        print(path)


@app.command()
def replay(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A journal that 'up --journal' or 'scheduler --journal' has written.")
    ],
    request: Annotated[str, o.option("request", "Id of an answer whose story to tell.")] = "",
    picture: bench.Picture = "",
    steps: Annotated[int, o.option("steps", "Steps of each executor in the picture.", min=1)] = 400,
) -> None:
    """Run a journal again and check that the same is decided."""
    from tools.replay import ReplayOptions, main

    raise typer.Exit(main(ReplayOptions(Path(file), request, picture, steps)))


app.command()(simulate)


@model_app.command("fetch")
def fetch(
    ref: Annotated[str, typer.Argument(metavar="REF", help="'default', a hub id, a local folder or a .gguf file.")],
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Folder to fill; the user's cache folder unless given.")
    ] = "",
) -> None:
    """Fetch and convert a model; print the folder to serve it from."""
    from tools import model

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves no half-made folder behind

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        folder = model.fetch(ref, Path(directory), report) if directory else model.cached(ref, report)
    except (OSError, ValueError) as error:
        raise TyperException(f"cannot fetch {ref}: {error}") from error
    print(folder)


if __name__ == "__main__":
    main()
