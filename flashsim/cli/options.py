"""The options that several commands have, single or in bundles (see `flashsim.cli.declare`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flashsim.api.samples import SAMPLES, TRACES
from flashsim.cli.declare import OUTPUT as OUTPUT
from flashsim.cli.declare import REQUIRED as REQUIRED
from flashsim.cli.declare import Format as Format
from flashsim.cli.declare import each as each
from flashsim.cli.declare import flag as flag
from flashsim.cli.declare import in_bundle
from flashsim.cli.declare import option as option
from flashsim.cli.declare import pair as pair
from flashsim.cli.declare import refuse_unused as refuse_unused
from flashsim.cli.declare import written as written
from flashsim.errors import OptionError, choices
from flashsim.l2 import L2Model
from flashsim.l2.launch import ORDERS, WALKS
from flashsim.problem.checks import DTYPES
from flashsim.problem.problem import Problem
from flashsim.schedule.plans import ALGORITHMS
from flashsim.schedule.presets import PRESETS

_SIZES, _MASK, _HOW, _L2 = "Sizes", "Mask and scores", "How", "L2 cache"


# -- what is computed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Sizes of one head."""

    panel = _SIZES
    n_q: int | None = in_bundle(None, "Number of queries.", "-n")
    n_kv: int | None = in_bundle(None, "Number of keys. Default: as many as queries.")
    head_dim: int | None = in_bundle(None, "Width of a row of Q and K (head dimension).", "-d")
    dtype: str | None = in_bundle(None, f"Element type of Q, K and V: {', '.join(DTYPES)}.")

    def given(self) -> dict[str, Any]:
        """The sizes that are not None, by the names of `Problem`."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Sizes(Lengths):
    """Sizes of a problem."""

    head_dim_v: int | None = in_bundle(None, "Width of a row of V. Default: that of Q.")
    batch: int | None = in_bundle(None, "Batch size.", "-b")
    heads: int | None = in_bundle(None, "Number of query heads.", "-h")
    kv_heads: int | None = in_bundle(None, "Number of KV heads. Default: as many as query heads.")


HEAD = Sizes(n_q=4096, head_dim=64, batch=1, heads=1, dtype="float32")
LAYER = Sizes(n_q=4096, head_dim=128, batch=1, heads=16, dtype="bfloat16")
BATCH = replace(LAYER, batch=4)


@dataclass(frozen=True)
class Scaling:
    """Scales of FP8 inputs."""

    panel = _SIZES
    scales: str | None = in_bundle(
        None,
        "FP8 only: one scale per tensor, per head or per block (give tensor, head, or "
        "QUERIESxKEYS such as 128x128).",
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
    seed: int = in_bundle(0, "Seed for drawing random tensors.")
    input: Path | None = in_bundle(
        None, "Read arrays q, k, v (and dout) from this .npz file instead of drawing random ones."
    )
    demo_data: str | None = in_bundle(
        None, f"Use tensors of a real model that come with flashsim: {' or '.join(SAMPLES)}."
    )


@dataclass(frozen=True)
class Mask:
    """The keys that each query sees."""

    panel = _MASK
    causal: bool = in_bundle(False, "Causal mask: query q sees keys k <= q + n_kv - n_q.")
    window: str | None = in_bundle(
        None,
        "Sliding window, LEFT:RIGHT: how many keys each query sees on either side; -1 is "
        "unlimited.",
    )


@dataclass(frozen=True)
class Scores(Mask):
    """A mask, and the operations on scores."""

    softcap: float = in_bundle(
        0.0, "Soft cap c: each score s becomes c tanh(s / c); 0 turns it off."
    )


# -- how it is run --------------------------------------------------------------------------------


_TILE = (
    "Tile size: QUERIESxKEYS, e.g. 128x64; fit: per algorithm, the tile that moves the fewest "
    "bytes; same: one tile that fits all algorithms; or a real kernel's tile: "
    f"{', '.join(PRESETS)}."
)
_GPU = "The GPU to simulate; `flashsim study devices` lists them."


@dataclass(frozen=True)
class One:
    """One pass, forward or backward."""

    panel = _HOW
    direction: str = in_bundle("forward", "Pass: forward or backward.")
    tiling: str = in_bundle("fit", _TILE, "-t")
    device: str = in_bundle("H100", _GPU)

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
    backward: bool = in_bundle(False, "Also the backward pass.")
    tiling: str = in_bundle("fit", f"{_TILE} For the forward pass.", "-t")
    backward_tiling: str = in_bundle("fit", "Tile size of the backward pass, given like --tiling.")
    device: str = in_bundle("H100", _GPU)


@dataclass(frozen=True)
class Simulated(Passes):
    """Passes on a device whose on-chip capacity can be changed."""

    sram: int | None = in_bundle(
        None, "On-chip memory per thread block in bytes. Default: that of --device."
    )
    key_order: str = in_bundle(
        "ascending", "Order in which key tiles are processed: ascending or descending."
    )


@dataclass(frozen=True)
class Parts:
    """The number of parts into which flash-decode divides the keys, and the keys' layout."""

    panel = _HOW
    splits: str | None = in_bundle(
        None,
        "flash-decode only: into how many parts the keys are split: a number, auto, or fa3 "
        "(FlashAttention-3's rule).",
    )
    page_size: int | None = in_bundle(None, "flash-decode only: keys per page of a paged KV cache.")

    def options(self) -> dict[str, Any]:
        """The options that were set for dividing the keys, in the library's form."""
        if self.splits is None:
            return {}
        return {"splits": int(self.splits) if self.splits.lstrip("-").isdecimal() else self.splits}


@dataclass(frozen=True)
class Decoding(Parts):
    """Options for how flash-decode reads the cache."""

    no_pack_gqa: bool = in_bundle(
        False, "flash-decode only: query heads that share a KV head do not share a tile."
    )
    shared_prefix: int | None = in_bundle(
        None, "flash-decode only: how many first keys all batch entries share."
    )
    latent: bool = in_bundle(
        False,
        "flash-decode only: latent attention (MLA), where V is the first head_dim_v columns of K.",
    )

    def posed(self, problem: Problem) -> Problem:
        """The problem with the cache layout of these options."""
        return replace(problem, page_size=self.page_size, latent=self.latent)

    def options(self) -> dict[str, Any]:
        """The options that were set for dividing the keys, in the library's form."""
        chosen = super().options()
        if self.shared_prefix is not None:
            chosen["shared_prefix"] = self.shared_prefix
        return {**chosen, **({"pack_gqa": False} if self.no_pack_gqa else {})}


@dataclass(frozen=True)
class L2:
    """Settings of the L2 cache model."""

    panel = _L2
    launch: str = in_bundle(
        "head-first", f"Order in which thread blocks start: {', '.join(ORDERS)}."
    )
    walk: str = in_bundle(
        "straight", f"Order in which a block processes its tile pairs: {', '.join(WALKS)}."
    )
    blocks_per_sm: int | None = in_bundle(
        None, "Thread blocks per SM at a time. Default: as many as fit."
    )
    partitions: int | None = in_bundle(
        None, "Partitions of the L2 cache, 1 or 2. Default: those of --device."
    )
    jitter: float = in_bundle(
        L2Model.jitter * 1e6, "Random variation of the time per tile pair, in µs."
    )
    warm: bool = in_bundle(
        False,
        "Start each kernel with the L2 contents that the kernel before it left. Default: an "
        "empty L2.",
    )

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
        help=f"Algorithm: {', '.join(ALGORITHMS)}. In the backward pass flash2 runs three kernels "
        "without atomics, and flash2-fused one kernel that adds dQ by atomics, as "
        "FlashAttention-2's authors do.",
        rich_help_panel=_HOW,
    ),
]


def algorithms(default: Any) -> Any:
    """Declare an option for several algorithms, separated by commas."""
    return option(
        default, f"Algorithms, separated by commas: {', '.join(ALGORITHMS)}.", "-a", panel=_HOW
    )


Backend = Annotated[
    str,
    typer.Option(
        help="What runs it: simulator, numba (CPU), cupy or numba_cuda (NVIDIA GPU).",
        rich_help_panel=_HOW,
    ),
]
Device = Annotated[str, typer.Option(help=_GPU, rich_help_panel=_HOW)]
Causal = Annotated[bool, typer.Option("--causal", help="Use a causal mask.", rich_help_panel=_MASK)]
Direction = Annotated[str, typer.Option(help="Pass: forward or backward.", rich_help_panel=_HOW)]
Seconds = Annotated[
    float | None,
    typer.Option(help="Measured time of one algorithm, in seconds.", rich_help_panel=_HOW),
]


#: Of commands that count unless they are told to run.
EXECUTE: Any = option(
    False,
    "Simulate on random tensors (or --input, --demo-data), and compare the results' numbers too.",
    panel=_HOW,
)


# -- what comes out -------------------------------------------------------------------------------


Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", help="File to write; its ending sets the format.", rich_help_panel=OUTPUT
    ),
]
Plot = Annotated[
    Path | None, typer.Option(help="Also write a plot to this file.", rich_help_panel=OUTPUT)
]
Theme = Annotated[str, typer.Option(help="Colors: light or dark.", rich_help_panel=OUTPUT)]


# -- pictures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The data to draw: saved traces, or algorithms run now on tensors of these sizes."""

    panel = _HOW
    trace: list[Path] | None = in_bundle(
        None,
        f"A saved trace, or a GPU's trace that comes with flashsim: {', '.join(TRACES)}. Give it "
        "twice for two traces. Without it, give sizes.",
        "-T",
    )
    sizes: Sizes = Sizes()
    tensors: Tensors = Tensors()
    mask: Mask = Mask()
    algorithm: str = in_bundle("flash2", "One or more algorithms, separated by commas.", "-a")
    how: One = One(tiling="same")
    execute: bool = in_bundle(
        False,
        "Simulate on tensors. Without it, the same events are counted by formula, without values.",
    )

    def names(self) -> list[str]:
        """The names of the algorithms."""
        return [name.strip() for name in self.algorithm.split(",")]

    def last(self) -> Source:
        """This source with its last algorithm only, for plots that show one."""
        return replace(self, algorithm=self.names()[-1])
