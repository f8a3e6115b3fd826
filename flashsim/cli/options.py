"""The options of the commands, single or in bundles: a dataclass per topic.

A command takes a bundle as one parameter, and `spread` turns it into one option per field. The
parameter's default, if any, holds the command's own defaults: ``sizes: Sizes = LAYER``. An option
that only one command has is a parameter with ``option(default, help)`` as its default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from flashsim.api.samples import SAMPLES, TRACES
from flashsim.errors import FlashSimError, OptionError, choices
from flashsim.l2 import L2Model
from flashsim.l2.launch import ORDERS, WALKS
from flashsim.problem.checks import DTYPES
from flashsim.problem.problem import Problem
from flashsim.schedule.plans import ALGORITHMS
from flashsim.schedule.presets import PRESETS

T = TypeVar("T")
_SIZES, _MASK, _HOW, OUTPUT, _L2 = "Sizes", "Mask and scores", "How", "Output", "L2 cache"
#: The default of an option that must be given.
REQUIRED: Any = ...


@dataclass(frozen=True)
class _Option:
    """An option that is named after the parameter or field that holds it."""

    default: Any
    help: str
    short: str = ""
    read: Callable[[str, str], Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def parameter(self, name: str, kind: Any, default: Any, panel: str | None) -> Any:
        """The option as a parameter for Typer."""
        about = typer.Option(
            *(flag(name), *self.short.split()),
            help=self.help,
            **{"rich_help_panel": panel, **self.more},
        )
        needed = {} if default is REQUIRED else {"default": default}
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
    """Declare an option as the default of a command's parameter, whose name it takes.

    `read` turns the option's name and its text into the value; a list is read from text with
    commas. `more` is passed to `typer.Option`.
    """
    return _Option(default, help, short, read, more | ({"rich_help_panel": panel} if panel else {}))


def _option(default: Any, help: str, short: str = "") -> Any:
    """Declare an option as the default of a bundle's field, whose name it takes."""
    return field(default=default, metadata={"option": _Option(default, help, short)})


def flag(name: str) -> str:
    """The option's name as the user types it."""
    return "--" + name.strip("_").replace("_", "-")


def each(convert: Callable[[str], Any]) -> Callable[[str, str], list[Any]]:
    """A reader that converts each value of ``a,b,c``."""

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
    """The reader of a list type; None for any other type."""
    one = next((x for x in (kind, *get_args(kind)) if get_origin(x) is list), None)
    return None if one is None else each(get_args(one)[0])


def pair(
    between: str, convert: Callable[[str], T], takes: str
) -> Callable[[str, str], tuple[T, T]]:
    """A reader of two values around a separator; `takes` describes the format in errors."""

    def read(name: str, text: str) -> tuple[T, T]:
        try:
            first, last = (convert(side) for side in text.lower().split(between))
        except ValueError:
            raise OptionError(f"{name} takes {takes}, got {text!r}") from None
        return first, last

    return read


def spread(command: Callable[..., Any], show: Callable[..., None]) -> Callable[..., None]:
    """`command` with each bundle among its parameters spread into its fields, for Typer.

    If a parameter has the name of a field, it replaces that field's option. The command's result
    is shown in the requested `Format`.
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
    def gathered(**given: Any) -> None:
        form = _gather(Format(), given) if shown else None
        own = {name: given.pop(name) for name in parameters if name in given}
        for name, read in readers.items():
            if own[name] is not None:
                own[name] = read(flag(name), own[name])
        own |= {name: _gather(defaults, given) for name, defaults in bundles.items()}
        found = command(**own)
        if shown:
            show(found, form)

    gathered.__signature__ = inspect.Signature([*flat.values()])  # type: ignore[attr-defined]
    gathered.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    return gathered


def _leaves(bundle: Any) -> dict[str, inspect.Parameter]:
    """Parameters for a bundle's fields, one each; a field may be a bundle itself."""
    found: dict[str, inspect.Parameter] = {}
    for name, kind in get_type_hints(type(bundle)).items():
        default = getattr(bundle, name)
        if is_dataclass(kind):
            found |= _leaves(default)
        else:
            about: _Option = bundle.__dataclass_fields__[name].metadata["option"]
            found[name] = about.parameter(name, kind, default, bundle.panel)
    return found


def _gather(defaults: Any, given: dict[str, Any]) -> Any:
    """Build a bundle from values taken out of `given`; others come from `defaults`."""
    return type(defaults)(
        **{
            name: _gather(default, given) if is_dataclass(default) else given.pop(name, default)
            for name in get_type_hints(type(defaults))
            for default in [getattr(defaults, name)]
        }
    )


def written(typed: typer.Context) -> list[str]:
    """Names of the options that were typed on the command line."""
    found = []
    for option in typed.command.params:
        source = typed.get_parameter_source(option.name or "")  # an enum, of click's or of Typer's
        if source is not None and source.name == "COMMANDLINE" and option.opts[0].startswith("--"):
            found.append(option.name or "")
    return found


def refuse_unused(
    typed: typer.Context,
    where: str,
    *,
    only: Iterable[str] | None = None,
    never: Iterable[str] = (),
) -> None:
    """Refuse options that were typed and have no effect in this case.

    These are the options in `never`; or, if `only` is set, all except `only` and the formats.

    Raises
    ------
    OptionError
    """
    never, only = set(never), None if only is None else {*only, "json", "csv"}
    idle = [n for n in written(typed) if n in never or (only is not None and n not in only)]
    if idle:
        them = "it" if len(idle) == 1 else "them"
        raise OptionError(f"{', '.join(map(flag, idle))}: not for {where}; leave {them} out")


# -- what is computed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Sizes of one head."""

    panel = _SIZES
    n_q: int | None = _option(None, "Queries.", "-n")
    n_kv: int | None = _option(None, "Keys. Default: as many as queries.")
    head_dim: int | None = _option(None, "Width of a row of Q and K.", "-d")
    dtype: str | None = _option(None, f"One of {', '.join(DTYPES)}.")

    def given(self) -> dict[str, Any]:
        """The sizes that are not None, by the names of `Problem`."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Sizes(Lengths):
    """Sizes of a problem."""

    head_dim_v: int | None = _option(None, "Width of a row of V. Default: as Q.")
    batch: int | None = _option(None, "Batch size.", "-b")
    heads: int | None = _option(None, "Query heads.", "-h")
    kv_heads: int | None = _option(None, "Key heads. Default: as many as query heads.")


HEAD = Sizes(n_q=4096, head_dim=64, batch=1, heads=1, dtype="float32")
LAYER = Sizes(n_q=4096, head_dim=128, batch=1, heads=16, dtype="bfloat16")
BATCH = replace(LAYER, batch=4)


@dataclass(frozen=True)
class Scaling:
    """Scales of FP8 inputs."""

    panel = _SIZES
    scales: str | None = _option(
        None, "FP8: one scale per tensor, head or block (QUERIESxKEYS, e.g. 128x128)."
    )

    def kind(self) -> str | tuple[int, int] | None:
        """The scales in the form of `Problem.scales`."""
        if self.scales is None or self.scales in ("tensor", "head"):
            return self.scales
        blocks = pair("x", int, "tensor, head or QUERIESxKEYS, e.g. 128x128")
        return blocks("--scales", self.scales)


@dataclass(frozen=True)
class Tensors:
    """The numbers on which a command runs."""

    panel = _SIZES
    seed: int = _option(0, "Of the random tensors.")
    input: Path | None = _option(
        None, "An .npz file with arrays q, k, v (and dout), instead of random tensors."
    )
    demo_data: str | None = _option(
        None, f"Bundled tensors of a real model: {' or '.join(SAMPLES)}."
    )


@dataclass(frozen=True)
class Mask:
    """The keys that each query sees."""

    panel = _MASK
    causal: bool = _option(False, "Causal mask: key k <= query + n_kv - n_q.")
    window: str | None = _option(None, "LEFT:RIGHT keys that each query sees; -1 is unlimited.")


@dataclass(frozen=True)
class Scores(Mask):
    """A mask, and the operations on scores."""

    softcap: float = _option(0.0, "c of c tanh(s / c); 0 is off.")


# -- how it is run --------------------------------------------------------------------------------


_TILE = (
    "QUERIESxKEYS, e.g. 128x64; fit: an algorithm's own, with the fewest bytes; same: one for all "
    f"of them; or a kernel's: {', '.join(PRESETS)}."
)
_GPU = "A GPU of `flashsim study devices`."


@dataclass(frozen=True)
class One:
    """One pass, forward or backward."""

    panel = _HOW
    direction: str = _option("forward", "Which pass: forward or backward.")
    tiling: str = _option("fit", _TILE, "-t")
    device: str = _option("H100", _GPU)

    def __post_init__(self) -> None:
        one_pass(self.direction)


def one_pass(direction: str) -> str:
    """Return the name of a pass after checking that it exists.

    Raises
    ------
    OptionError
    """
    if direction not in ("forward", "backward"):
        raise OptionError(
            f"unknown --direction {direction!r}; {choices(direction, ('forward', 'backward'))}"
        )
    return direction


@dataclass(frozen=True)
class Passes:
    """The forward pass, and the backward pass if requested."""

    panel = _HOW
    backward: bool = _option(False, "The backward pass as well.")
    tiling: str = _option("fit", f"{_TILE} Forward pass.", "-t")
    backward_tiling: str = _option("fit", "The same for the backward pass.")
    device: str = _option("H100", _GPU)


@dataclass(frozen=True)
class Simulated(Passes):
    """Passes on a device whose on-chip capacity can be changed."""

    sram: int | None = _option(None, "Bytes on chip, instead of the device's.")
    key_order: str = _option("ascending", "Order of key tiles: ascending or descending.")


@dataclass(frozen=True)
class Parts:
    """The number of parts into which flash-decode divides the keys, and the keys' layout."""

    panel = _HOW
    splits: str | None = _option(None, "flash-decode: parts of the keys; a number, auto or fa3.")
    page_size: int | None = _option(None, "flash-decode: keys per page of the cache.")

    def options(self) -> dict[str, Any]:
        """The options that were set for dividing the keys, in the library's form."""
        if self.splits is None:
            return {}
        return {"splits": int(self.splits) if self.splits.lstrip("-").isdecimal() else self.splits}


@dataclass(frozen=True)
class Decoding(Parts):
    """Options for how flash-decode reads the cache."""

    no_pack_gqa: bool = _option(False, "flash-decode: grouped query heads do not share a tile.")
    shared_prefix: int | None = _option(None, "flash-decode: keys that all entries begin with.")
    latent: bool = _option(False, "flash-decode: V is the first head_dim_v columns of K (MLA).")

    def posed(self, problem: Problem) -> Problem:
        """The problem with the cache layout of these options."""
        return replace(problem, page_size=self.page_size, latent=self.latent)

    def options(self) -> dict[str, Any]:
        """The options that were set for dividing the keys, in the library's form."""
        found = super().options()
        if self.shared_prefix is not None:
            found["shared_prefix"] = self.shared_prefix
        return {**found, **({"pack_gqa": False} if self.no_pack_gqa else {})}


@dataclass(frozen=True)
class L2:
    """Settings of the L2 cache model."""

    panel = _L2
    launch: str = _option("head-first", f"Order of thread blocks: {', '.join(ORDERS)}.")
    walk: str = _option("straight", f"Order of a block's tile pairs: {', '.join(WALKS)}.")
    blocks_per_sm: int | None = _option(None, "Thread blocks per SM. Default: as many as fit.")
    partitions: int | None = _option(None, "1 or 2. Default: the device's.")
    jitter: float = _option(L2Model.jitter * 1e6, "How far a tile pair's time varies, in µs.")
    warm: bool = _option(False, "A stage finds in L2 what the last one left.")

    def model(self) -> L2Model:
        """These settings as an `L2Model`."""
        return L2Model(
            *(self.launch, self.walk, self.blocks_per_sm, self.partitions),
            jitter=self.jitter * 1e-6,
            flush=not self.warm,
        )


Algorithm = Annotated[
    str,
    typer.Option(
        "--algorithm",
        "-a",
        help=f"{', '.join(ALGORITHMS)}. Backward, flash2 runs three passes; flash2-fused is the "
        "one-pass form of FlashAttention-2's authors (dQ by atomics).",
        rich_help_panel=_HOW,
    ),
]


def algorithms(default: Any) -> Any:
    """Declare an option for several algorithms, separated by commas."""
    return option(default, f"Some of {', '.join(ALGORITHMS)}.", "-a", panel=_HOW)


Backend = Annotated[
    str,
    typer.Option(
        help="What executes it; simulator, numba, cupy or numba_cuda.", rich_help_panel=_HOW
    ),
]
Device = Annotated[str, typer.Option(help=_GPU, rich_help_panel=_HOW)]
Causal = Annotated[bool, typer.Option("--causal", help="Causal mask.", rich_help_panel=_MASK)]
Direction = Annotated[
    str, typer.Option(help="Which pass: forward or backward.", rich_help_panel=_HOW)
]
Seconds = Annotated[
    float | None,
    typer.Option(help="Measured time of one algorithm.", rich_help_panel=_HOW),
]


#: Of commands that count unless they are told to run.
EXECUTE: Any = option(
    False, "Run it on random tensors (or --input, --demo-data) and show differences.", panel=_HOW
)


# -- what comes out -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """Tables for people, or one format for programs."""

    panel = OUTPUT
    json: bool = _option(False, "Print JSON instead of tables.")
    csv: bool = _option(False, "Print CSV instead of tables.")

    def __post_init__(self) -> None:
        if self.json and self.csv:
            raise OptionError("--json and --csv are two formats; give one of them")


Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", help="File to write; its ending is the format.", rich_help_panel=OUTPUT
    ),
]
Plot = Annotated[
    Path | None, typer.Option(help="Also draw it, in this file.", rich_help_panel=OUTPUT)
]
Theme = Annotated[str, typer.Option(help="light or dark.", rich_help_panel=OUTPUT)]


# -- pictures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The data to draw: saved traces, or algorithms run now on tensors of these sizes."""

    panel = _HOW
    trace: list[Path] | None = _option(
        None,
        f"A saved trace, or a bundled one of a GPU: {', '.join(TRACES)}. Twice for two. "
        "Otherwise give sizes.",
        "-T",
    )
    sizes: Sizes = Sizes()
    tensors: Tensors = Tensors()
    mask: Mask = Mask()
    algorithm: str = _option("flash2", "One or several, separated by commas.", "-a")
    how: One = One(tiling="same")
    execute: bool = _option(
        False, "Run it on tensors. Otherwise it is counted: the same events, without values."
    )

    def names(self) -> list[str]:
        """The names of the algorithms."""
        return [name.strip() for name in self.algorithm.split(",")]

    def last(self) -> Source:
        """This source with its last algorithm only, for plots that show one."""
        return replace(self, algorithm=self.names()[-1])
