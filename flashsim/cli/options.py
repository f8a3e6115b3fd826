"""The options of the commands, in bundles: a command takes one dataclass for each topic.

`spread` turns a parameter that is such a bundle into one option a field. The parameter's
default, if it has one, holds the command's own defaults: ``sizes: opt.Sizes = opt.LAYER``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from flashsim.api.samples import SAMPLES, TRACES
from flashsim.errors import OptionError
from flashsim.l2 import L2Model
from flashsim.l2.launch import ORDERS, WALKS
from flashsim.problem.checks import DTYPES
from flashsim.problem.problem import Problem
from flashsim.schedule.plans import ALGORITHMS
from flashsim.schedule.presets import PRESETS

_SIZES, _MASK, _HOW, _OUTPUT, _L2 = "Sizes", "Mask and scores", "How", "Output", "L2 cache"


def _option(default: Any, help: str, short: str = "") -> Any:
    """A field of a bundle; the option is called as the field is."""
    return field(default=default, metadata={"help": help, "short": short})


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as Typer reads it: each bundle among its parameters spread into its fields."""
    hints: dict[str, Any] = get_type_hints(command, include_extras=True)
    bundles: dict[str, Any] = {}
    flat: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            given = parameter.default is not parameter.empty
            bundles[name] = kind
            flat |= _leaves(kind, parameter.default if given else bundles[name]())
        else:
            flat[name] = parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY)

    @wraps(command)
    def gathered(**given: Any) -> None:
        for name, kind in bundles.items():
            given[name] = _gather(kind, given)
        command(**given)

    gathered.__signature__ = inspect.Signature([*flat.values()])  # type: ignore[attr-defined]
    gathered.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    return gathered


def _leaves(kind: Any, defaults: Any) -> dict[str, inspect.Parameter]:
    """One parameter a field; a field may be a bundle itself."""
    found: dict[str, inspect.Parameter] = {}
    for name, each in get_type_hints(kind).items():
        default = getattr(defaults, name)
        if is_dataclass(each):
            found |= _leaves(each, default)
            continue
        about = kind.__dataclass_fields__[name].metadata
        option = typer.Option(
            *("--" + name.replace("_", "-"), *about["short"].split()),
            help=about["help"],
            rich_help_panel=kind.panel,
        )
        found[name] = inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[each, option],
        )
    return found


def _gather(kind: Any, given: dict[str, Any]) -> Any:
    """The bundle of the values given, which are taken out."""
    types = get_type_hints(kind)
    return kind(
        **{
            name: _gather(t, given) if is_dataclass(t) else given.pop(name)
            for name, t in types.items()
        }
    )


def changed(bundle: Any, defaults: Any) -> list[str]:
    """Names of the options, also of bundles inside, that are not the default."""
    found = []
    for name in get_type_hints(type(bundle)):
        value, default = getattr(bundle, name), getattr(defaults, name)
        if is_dataclass(value):
            found += changed(value, default)
        elif value != default:
            found.append(name)
    return found


def refuse_unused(
    typed: typer.Context,
    where: str,
    *,
    only: Iterable[str] | None = None,
    never: Iterable[str] = (),
) -> None:
    """Refuse options that were typed and would say nothing there.

    Those called `never`; or, given `only`, all the others, except for a format.

    Raises
    ------
    OptionError
    """
    never, only = set(never), None if only is None else {*only, "json", "csv"}
    idle = []
    for option in typed.command.params:
        name, first = option.name or "", option.opts[0]
        source = typed.get_parameter_source(name)  # an enum, of click's or of Typer's own
        if source is None or source.name != "COMMANDLINE" or not first.startswith("--"):
            continue
        if name in never or (only is not None and name not in only):
            idle.append(first)
    if idle:
        them = "it" if len(idle) == 1 else "them"
        raise OptionError(f"{', '.join(idle)}: not for {where}; leave {them} out")


# -- what is asked --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Sizes of one head."""

    panel = _SIZES
    n_q: int | None = _option(None, "Queries.", "-n")
    n_kv: int | None = _option(None, "Keys; as many as queries.")
    head_dim: int | None = _option(None, "Width of q and k rows.", "-d")
    dtype: str | None = _option(None, f"One of {', '.join(DTYPES)}.")

    def given(self) -> dict[str, Any]:
        """Those that are not None, by the names of `Problem`."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Sizes(Lengths):
    """Sizes of a problem."""

    head_dim_v: int | None = _option(None, "Width of v rows; as q.")
    batch: int | None = _option(None, "Batch size.", "-b")
    heads: int | None = _option(None, "Query heads.", "-h")
    kv_heads: int | None = _option(None, "Key heads; as query heads.")


HEAD = Sizes(n_q=4096, head_dim=64, batch=1, heads=1, dtype="float32")
LAYER = Sizes(n_q=4096, head_dim=128, batch=1, heads=16, dtype="bfloat16")
BATCH = replace(LAYER, batch=4)


@dataclass(frozen=True)
class Scaling:
    """Scales of FP8 inputs."""

    panel = _SIZES
    scales: str | None = _option(
        None, "FP8: a scale for each tensor, head or block (QUERIESxKEYS, e.g. 128x128)."
    )

    def kind(self) -> str | tuple[int, int] | None:
        """As `Problem.scales` has it."""
        if self.scales is None or self.scales in ("tensor", "head"):
            return self.scales
        try:
            rows, keys = (int(side) for side in self.scales.lower().split("x"))
        except ValueError:
            raise OptionError(
                f"--scales takes tensor, head or QUERIESxKEYS, e.g. 128x128, got {self.scales!r}"
            ) from None
        return rows, keys


@dataclass(frozen=True)
class Tensors:
    """Which numbers a command runs on."""

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
    """Which keys a query sees."""

    panel = _MASK
    causal: bool = _option(False, "Key k <= query + n_kv - n_q.")
    window: str | None = _option(None, "LEFT:RIGHT keys each query sees; -1 unlimited.")


@dataclass(frozen=True)
class Scores(Mask):
    """A mask, and what is done to scores."""

    softcap: float = _option(0.0, "c of c tanh(s / c); 0 is off.")


# -- how it is run --------------------------------------------------------------------------------


_TILE = f"QUERIESxKEYS, e.g. 128x64; fit; or a kernel's: {', '.join(PRESETS)}."


@dataclass(frozen=True)
class One:
    """One pass, forward or backward."""

    panel = _HOW
    backward: bool = _option(False, "The backward pass instead of the forward.")
    tiling: str = _option("fit", _TILE, "-t")
    device: str = _option("H100", "See `flashsim devices`.")

    @property
    def direction(self) -> str:
        """As the library calls it."""
        return "backward" if self.backward else "forward"


@dataclass(frozen=True)
class Passes:
    """The forward pass, and the backward one on demand."""

    panel = _HOW
    backward: bool = _option(False, "The backward pass as well.")
    tiling: str = _option("fit", f"{_TILE} Forward pass.", "-t")
    backward_tiling: str = _option("fit", "The same for the backward.")
    device: str = _option("H100", "See `flashsim devices`.")


@dataclass(frozen=True)
class Simulated(Passes):
    """Passes on a device that can be changed."""

    sram: int | None = _option(None, "Bytes on chip, instead of the device's.")
    key_order: str = _option("ascending", "ascending or descending.")


@dataclass(frozen=True)
class Decoding:
    """How flash-decode divides the keys."""

    panel = _HOW
    splits: str | None = _option(None, "flash-decode: parts of the keys; a number, auto or fa3.")
    no_pack_gqa: bool = _option(False, "flash-decode: grouped query heads do not share a tile.")

    page_size: int | None = _option(None, "flash-decode: keys a page of the cache.")
    shared_prefix: int | None = _option(None, "flash-decode: keys that all entries begin with.")
    latent: bool = _option(False, "flash-decode: V is the first head_dim_v columns of K (MLA).")

    def posed(self, problem: Problem) -> Problem:
        """The problem of a cache that lies as is said here."""
        return replace(problem, page_size=self.page_size, latent=self.latent)

    def options(self) -> dict[str, Any]:
        """How keys are divided, of what is given, as the library takes them."""
        splits: int | str | None = self.splits
        if self.splits is not None and self.splits.lstrip("-").isdecimal():
            splits = int(self.splits)
        found: dict[str, Any] = {} if splits is None else {"splits": splits}
        if self.shared_prefix is not None:
            found["shared_prefix"] = self.shared_prefix
        return {**found, **({"pack_gqa": False} if self.no_pack_gqa else {})}


@dataclass(frozen=True)
class L2:
    """The model of the L2 cache."""

    panel = _L2
    launch: str = _option("head-first", f"Order of blocks: {', '.join(ORDERS)}.")
    walk: str = _option("straight", f"Order of a block's visits: {', '.join(WALKS)}.")
    blocks_per_sm: int | None = _option(None, "Blocks an SM; what fits.")
    partitions: int | None = _option(None, "1 or 2; the device's.")
    jitter: float = _option(L2Model.jitter * 1e6, "How far a visit's time strays, in µs.")
    warm: bool = _option(False, "A stage finds in L2 what the last one left.")

    def model(self) -> L2Model:
        """As the library takes it."""
        return L2Model(
            *(self.launch, self.walk, self.blocks_per_sm, self.partitions),
            jitter=self.jitter * 1e-6,
            flush=not self.warm,
        )


Algorithm = Annotated[
    str,
    typer.Option("--algorithm", "-a", help=f"{', '.join(ALGORITHMS)}.", rich_help_panel=_HOW),
]
Algorithms = Annotated[
    str,
    typer.Option("--algorithms", "-a", help=f"Of {', '.join(ALGORITHMS)}.", rich_help_panel=_HOW),
]
Backend = Annotated[
    str,
    typer.Option(help="What executes it; numpy is the simulator.", rich_help_panel=_HOW),
]


# -- what comes out -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """Tables for people, or one format for programs."""

    panel = _OUTPUT
    json: bool = _option(False, "Print JSON instead of tables.")
    csv: bool = _option(False, "Print CSV instead of tables.")

    def __post_init__(self) -> None:
        if self.json and self.csv:
            raise OptionError("--json and --csv are two formats; give one of them")


# -- pictures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """What is drawn: saved traces, or algorithms run now on tensors of these sizes."""

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
    algorithms: str = _option("flash2", "Separated by commas; run on the same tensors.", "-a")
    how: One = One(tiling="64x64")


Out = Annotated[Path, typer.Option("--out", "-o", help="File to write; its ending is the format.")]
Theme = Annotated[str, typer.Option(help="light or dark.")]
Row = Annotated[int | None, typer.Option(help="Query row whose m and l are followed.")]
