"""Declare command-line options for Typer: single ones, or bundles (one dataclass per topic).

A command takes a bundle (a dataclass of options) as one parameter, and `spread` turns it into one
option per field. A command can have its own defaults: the default value of the parameter, as in
``sizes: Sizes = LAYER``. An option that only one command has is declared as a parameter whose
default is ``option(default, help)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from flashsim.errors import FlashSimError, OptionError

T = TypeVar("T")
OUTPUT = "Output"


@dataclass(frozen=True)
class _Option:
    """A command-line option; its name is that of the parameter or field that declares it."""

    default: Any
    help: str
    short: str = ""
    read: Callable[[str, str], Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def parameter(self, name: str, kind: Any, default: Any, panel: str | None) -> Any:
        """Return this option as a parameter in Typer's form."""
        about = typer.Option(
            *(() if "/" in self.short else (flag(name),)),
            *self.short.split(),
            help=self.help,
            **{"rich_help_panel": panel, **self.more},
        )
        needed = {} if default is ... else {"default": default}
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, keyword, annotation=Annotated[kind, about], **needed)


def option(
    default: Any,
    help: str,
    short: str = "",
    read: Callable[[str, str], Any] | None = None,
    panel: str | None = None,
    **more: Any,
) -> Any:
    """Declare an option as the default of a command's parameter; the parameter names the option.

    `read(name, text)` converts the text to the option's value. For a list, commas separate the
    values in the text. The arguments in `more` are passed to `typer.Option`.
    """
    return _Option(default, help, short, read, more | ({"rich_help_panel": panel} if panel else {}))


def in_bundle(default: Any, help: str, short: str = "") -> Any:
    """Declare an option as the default of a bundle's field; the field names the option."""
    return field(default=default, metadata={"option": _Option(default, help, short)})


@dataclass(frozen=True)
class Format:
    """The output's format: tables for people, or JSON or CSV for programs."""

    panel = OUTPUT
    json: bool = in_bundle(False, "Print JSON instead of tables.")
    csv: bool = in_bundle(False, "Print CSV instead of tables.")

    def __post_init__(self) -> None:
        if self.json and self.csv:
            raise OptionError("--json and --csv are different formats; pass only one of them")


def flag(name: str) -> str:
    """Return an option's name in the form that the user types."""
    return "--" + name.strip("_").replace("_", "-")


def each(convert: Callable[[str], Any]) -> Callable[[str, str], list[Any]]:
    """Return a parser of comma-separated text that applies `convert` to each value."""

    def read(name: str, text: str) -> list[Any]:
        try:
            return [convert(part.strip()) for part in text.split(",")]
        except FlashSimError:
            raise
        except ValueError:
            raise OptionError(
                f"{name} takes values separated by commas, e.g. 1024,2048; got {text!r}"
            ) from None

    return read


def _lists(kind: Any) -> Callable[[str, str], list[Any]] | None:
    """Return a function that converts a text with commas to the list type `kind`, or None."""
    list_type = next((x for x in (kind, *get_args(kind)) if get_origin(x) is list), None)
    return None if list_type is None else each(get_args(list_type)[0])


def pair(
    between: str, convert: Callable[[str], T], takes: str
) -> Callable[[str, str], tuple[T, T]]:
    """Return a function that converts two values with a separator; errors quote `takes`."""

    def read(name: str, text: str) -> tuple[T, T]:
        try:
            first, last = (convert(side) for side in text.lower().split(between))
        except ValueError:
            raise OptionError(f"{name} must be {takes}, got {text!r}") from None
        return first, last

    return read


def spread(command: Callable[..., Any], show: Callable[..., None]) -> Callable[..., None]:
    """Return the command for Typer, in which one parameter per field replaces each bundle.

    A parameter of the command replaces a bundle's field of the same name. The returned function
    prints the command's result in the requested `Format`.
    """
    hints: dict[str, Any] = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    bundles: dict[str, Any] = {}
    readers: dict[str, Callable[[str, str], Any]] = {}
    flat: dict[str, inspect.Parameter] = {}
    for name, parameter in parameters.items():
        kind, default = hints[name], parameter.default
        if is_dataclass(kind):
            bundles[name] = kind() if default is parameter.empty else default  # type: ignore[operator]
            flat |= _leaves(bundles[name])
        elif isinstance(default, _Option):
            if read := default.read or _lists(kind):
                readers[name], kind = read, str if default.default is not None else str | None
            flat[name] = default.parameter(name, kind, default.default, None)
        else:
            flat[name] = parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY)

    if shown := hints["return"] is not type(None):
        flat |= _leaves(Format())

    @wraps(command)
    def gathered(**received: Any) -> None:
        form = _gather(Format(), received) if shown else None
        own = {name: received.pop(name) for name in parameters if name in received}
        for name, read in readers.items():
            if own[name] is not None:
                own[name] = read(flag(name), own[name])
        own |= {name: _gather(defaults, received) for name, defaults in bundles.items()}
        result = command(**own)
        if shown:
            show(result, form)

    gathered.__signature__ = inspect.Signature([*flat.values()])  # type: ignore[attr-defined]
    gathered.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    return gathered


def _leaves(bundle: Any) -> dict[str, inspect.Parameter]:
    """Return one parameter per field of a bundle, including the fields of nested bundles."""
    parameters: dict[str, inspect.Parameter] = {}
    for name, kind in get_type_hints(type(bundle)).items():
        default = getattr(bundle, name)
        if is_dataclass(kind):
            parameters |= _leaves(default)
        else:
            about: _Option = bundle.__dataclass_fields__[name].metadata["option"]
            parameters[name] = about.parameter(name, kind, default, bundle.panel)
    return parameters


def _gather(defaults: Any, received: dict[str, Any]) -> Any:
    """Build a bundle: move values out of `received`, and take missing values from `defaults`."""
    return type(defaults)(
        **{
            name: _gather(default, received)
            if is_dataclass(default)
            else received.pop(name, default)
            for name in get_type_hints(type(defaults))
            for default in [getattr(defaults, name)]
        }
    )


def written(typed: typer.Context) -> list[str]:
    """Return the names of the options that were typed on the command line."""
    names = []
    for option in typed.command.params:
        source = typed.get_parameter_source(option.name or "")  # an enum, of click's or of Typer's
        if source is not None and source.name == "COMMANDLINE" and option.opts[0].startswith("--"):
            names.append(option.name or "")
    return names


def of_program(typed: typer.Context, words: list[str] | None) -> list[str]:
    """Return the arguments of the program that a command runs: all words after the program.

    After the program, an option that the command has too is ambiguous, except after `--`.
    """
    words = words or []
    if words[:1] == ["--"]:
        return words[1:]
    own = {name for option in typed.command.params for name in option.opts}
    before = words[: words.index("--")] if "--" in words else words
    if clash := [word for word in before if word.partition("=")[0] in own]:
        raise OptionError(
            f"{clash[0]} after the program could be an option of flashsim or of the program; put "
            "flashsim's options before the program, or -- before the program's"
        )
    return words


def refuse_unused(
    typed: typer.Context,
    where: str,
    *,
    only: Iterable[str] | None = None,
    never: Iterable[str] = (),
) -> None:
    """Raise `OptionError` if the user typed options that have no effect.

    The options in `never` have no effect. If `only` is set, all options except `only` and the
    output formats have no effect either.
    """
    never, only = set(never), None if only is None else {*only, "json", "csv"}
    idle = [
        flag(n if typed.params[n] is not False else f"no_{n}")
        for n in written(typed)
        if n in never or (only is not None and n not in only)
    ]
    if len(idle) == 1:
        raise OptionError(f"the option {idle[0]} has no effect with {where}; leave it out")
    if idle:
        options = ", ".join(idle)
        raise OptionError(f"the options {options} have no effect with {where}; leave them out")
