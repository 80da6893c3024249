"""Commands whose options are the fields of a dataclass: each is listed once, with its default, and arrives by name.

A field that is a dataclass itself is a group of options that other commands may have too. Typer reads the options off
the signature that is made here. Used by ``tools.main`` and ``tools.services``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

import typer

Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[[Options], int]], Callable[..., None]]:
    """Make a command of a function of ``options`` that returns the exit code."""

    def command_of(run: Callable[[Options], int]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            raise typer.Exit(run(_made(options, given)))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = Signature(list(_parameters(options)))  # type: ignore[attr-defined]
        return command

    return command_of


def _parameters(options: type) -> Iterator[Parameter]:
    """One for each option, in the order of the fields, those of a group in its place."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        hint = hints[field.name]
        if _is_group(hint):
            yield from _parameters(hint)
        else:
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)


def _made(options: type[Options], given: Mapping[str, Any]) -> Options:
    hints = get_type_hints(options)
    return options(**{name: _made(hint, given) if _is_group(hint) else given[name] for name, hint in hints.items()})


def _is_group(hint: Any) -> bool:
    return is_dataclass(hint)
