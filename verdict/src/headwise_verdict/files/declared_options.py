"""Options of a command line that are declared once: they are the fields of the dataclass that carries them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer


def option(default: Any, *names: str, help: str, **more: Any) -> Any:
    """Return a dataclass field that is an option; a field that is a tuple is an option to be repeated.

    Args:
        default: the field's value without the option.
        names: of the option; none: the field's, in dashes.
        help: the line that `--help` prints.
        more: what typer.Option also takes.
    """
    return dataclasses.field(default=default, metadata={"declared": typer.Option(*names, help=help, **more)})


def argument(default: Any, *, help: str, **more: Any) -> Any:
    """Return a dataclass field that is an argument."""
    return dataclasses.field(default=default, metadata={"declared": typer.Argument(help=help, **more)})


def takes_options_of(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command, a function of any keywords, the options that a dataclass declares.

    It receives each by its field's name: of a repeated option a tuple, and of an argument None where it is not given.
    """
    hints: dict[str, Any] = get_type_hints(kind)
    parameters, many = [], set()
    for field in dataclasses.fields(kind):
        if "declared" not in field.metadata:
            continue
        # typer knows lists, of which an option given nowhere is None
        hint: Any = hints[field.name]
        default, declared = field.default, field.metadata["declared"]
        if isinstance(default, tuple):
            many.add(field.name)
            hint, default = list[get_args(hint)[0]] | None, None  # type: ignore[misc]  # a hint made at run time
        elif isinstance(declared, typer.models.ArgumentInfo):
            hint, default = hint | None, None
        shown: Any = Annotated[hint, declared]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, keyword, default=default, annotation=shown))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            command(**{name: tuple(value or ()) if name in many else value for name, value in given.items()})

        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads both
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return decorate
