"""Options that several commands share, alone or in bundles (see `flashsim.cli.declare`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flashsim.api.samples import SAMPLES, TRACES
from flashsim.cli.declare import OUTPUT, in_bundle, option, pair
from flashsim.l2 import L2Model
from flashsim.l2.launch import ORDERS, WALKS
from flashsim.problem import checks
from flashsim.problem.checks import DTYPES
from flashsim.problem.problem import Problem
from flashsim.schedule.plans import ALGORITHMS
from flashsim.schedule.presets import PRESETS

_SIZES, _MASK, _HOW, _L2 = "Sizes", "Mask and scores", "How", "L2 cache"


# -- what is computed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Options for the sizes of one head."""

    panel = _SIZES
    n_q: int | None = in_bundle(None, "Number of queries.", "-n")
    n_kv: int | None = in_bundle(None, "Number of keys. Default: the number of queries.")
    head_dim: int | None = in_bundle(None, "Width of a row of Q and K (head dimension).", "-d")
    dtype: str | None = in_bundle(None, f"Element type of Q, K and V: {', '.join(DTYPES)}.")

    def given(self) -> dict[str, Any]:
        """Return the sizes that were set, as keyword arguments of `Problem`."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Sizes(Lengths):
    """Options for all sizes of a problem."""

    head_dim_v: int | None = in_bundle(None, "Width of a row of V. Default: that of Q.")
    batch: int | None = in_bundle(None, "Batch size.", "-b")
    heads: int | None = in_bundle(None, "Number of query heads.", "-h")
    kv_heads: int | None = in_bundle(None, "Number of KV heads. Default: that of query heads.")


HEAD = Sizes(n_q=4096, head_dim=64, batch=1, heads=1, dtype="float32")
LAYER = Sizes(n_q=4096, head_dim=128, batch=1, heads=16, dtype="bfloat16")
BATCH = replace(LAYER, batch=4)


@dataclass(frozen=True)
class Scaling:
    """Options for the scales of FP8 inputs."""

    panel = _SIZES
    scales: str | None = in_bundle(
        None,
        "FP8 only: one scale per tensor, per head or per block: tensor, head, or QUERIESxKEYS "
        "such as 128x128.",
    )

    def kind(self) -> str | tuple[int, int] | None:
        """Return the scales in the form that `Problem.scales` takes."""
        if self.scales is None or self.scales in ("tensor", "head"):
            return self.scales
        blocks = pair("x", int, "tensor, head or QUERIESxKEYS, e.g. 128x128")
        return blocks("--scales", self.scales)


@dataclass(frozen=True)
class Tensors:
    """Options for the tensors on which a command runs: a file, demo data, or random."""

    panel = _SIZES
    seed: int = in_bundle(0, "Seed for drawing random tensors.")
    input: Path | None = in_bundle(
        None, "Read arrays q, k, v (and dout) from this .npz file instead of drawing random ones."
    )
    demo_data: str | None = in_bundle(
        None, f"Use tensors of a real model, included in flashsim: {' or '.join(SAMPLES)}."
    )


@dataclass(frozen=True)
class Mask:
    """Options for the mask: which keys each query sees."""

    panel = _MASK
    causal: bool = in_bundle(False, "Causal mask: query q sees keys k <= q + n_kv - n_q.")
    window: str | None = in_bundle(
        None,
        "Sliding window, LEFT:RIGHT: the number of keys that each query sees before and after its "
        "own; -1 means no limit.",
    )


@dataclass(frozen=True)
class Scores(Mask):
    """Options for the mask and for the operations on scores."""

    softcap: float = in_bundle(
        0.0, "Soft cap c: each score s becomes c tanh(s / c); 0 turns it off."
    )


# -- how it is run --------------------------------------------------------------------------------


_TILE = (
    "Tile size: QUERIESxKEYS, e.g. 128x64; fit: for each algorithm, the tile that moves the "
    "fewest bytes without a mask; same: one tile that fits on chip for all algorithms; or a real "
    f"kernel's tile: {', '.join(PRESETS)}."
)
PASS = "Pass: forward or backward."
GPU = "The GPU to simulate; `flashsim study devices` lists them."


@dataclass(frozen=True)
class One:
    """Options of a command that counts or runs one pass, forward or backward."""

    panel = _HOW
    direction: str = in_bundle("forward", PASS)
    tiling: str = in_bundle("fit", _TILE, "-t")
    device: str = in_bundle("H100", GPU)

    def __post_init__(self) -> None:
        one_pass(self.direction)


def one_pass(direction: str) -> str:
    """Return `direction`; raise `OptionError` unless it is "forward" or "backward"."""
    return str(checks.one_of("--direction", direction, ("forward", "backward")))


@dataclass(frozen=True)
class Passes:
    """Options of a command that counts or runs the forward and, if requested, the backward pass."""

    panel = _HOW
    backward: bool = in_bundle(False, "Also run or count the backward pass.")
    tiling: str = in_bundle("fit", f"{_TILE} For the forward pass.", "-t")
    backward_tiling: str = in_bundle(
        "fit",
        "Tile size of the backward pass, like --tiling. A third number, as in 64x128x128, is the "
        "number of query rows per tile in a pass that computes dQ alone.",
    )
    device: str = in_bundle("H100", GPU)


@dataclass(frozen=True)
class Simulated(Passes):
    """Options of passes on a simulated device; the user can change its on-chip memory size."""

    sram: int | None = in_bundle(
        None, "On-chip memory per thread block in bytes. Default: that of --device."
    )
    key_order: str = in_bundle(
        "ascending", "Order in which key tiles are processed: ascending or descending."
    )


@dataclass(frozen=True)
class Parts:
    """Options for the split of the keys in flash-decode, the cache's layout, and packed heads."""

    panel = _HOW
    splits: str | None = in_bundle(
        None,
        "flash-decode only: number of splits of the keys: a number, auto, or fa3 "
        "(FlashAttention-3's rule).",
    )
    page_size: int | None = in_bundle(None, "flash-decode only: keys per page of a paged KV cache.")
    pack_gqa: bool | None = in_bundle(
        None,
        "Forward: put query heads that share a KV head into one tile, or do not. Default: "
        "flash-decode does; flash2 does not, but its GPU kernels choose.",
        "--pack-gqa/--no-pack-gqa",
    )

    def options(self) -> dict[str, Any]:
        """Return the options that were set, as keyword arguments of `flashsim.run`."""
        chosen: dict[str, Any] = {} if self.pack_gqa is None else {"pack_gqa": self.pack_gqa}
        if (n := self.splits) is not None:
            chosen["splits"] = int(n) if n.lstrip("-").isdecimal() else n
        return chosen


@dataclass(frozen=True)
class Decoding(Parts):
    """Options for how flash-decode splits and reads the KV cache."""

    shared_prefix: int | None = in_bundle(
        None, "flash-decode only: number of keys at the start that all batch entries share."
    )
    latent: bool = in_bundle(
        False,
        "flash-decode only: latent attention (MLA), where V is the first head_dim_v columns of K.",
    )

    def posed(self, problem: Problem) -> Problem:
        """Return the problem with the KV-cache layout that these options describe."""
        return replace(problem, page_size=self.page_size, latent=self.latent)

    def options(self) -> dict[str, Any]:
        """Return the options that were set, as keyword arguments of `flashsim.run`."""
        shared = {} if self.shared_prefix is None else {"shared_prefix": self.shared_prefix}
        return super().options() | shared


@dataclass(frozen=True)
class L2:
    """Options for the model of the L2 cache."""

    panel = _L2
    launch: str = in_bundle(
        "head-first", f"Order in which thread blocks start: {', '.join(ORDERS)}."
    )
    walk: str = in_bundle(
        "straight", f"Order in which a block processes its tile pairs: {', '.join(WALKS)}."
    )
    blocks_per_sm: int | None = in_bundle(
        None, "Thread blocks per SM at the same time. Default: as many as fit."
    )
    partitions: int | None = in_bundle(
        None, "Partitions of the L2 cache, 1 or 2. Default: those of --device."
    )
    jitter: float = in_bundle(
        L2Model.jitter * 1e6, "Random variation of the time per tile pair, in µs."
    )
    warm: bool = in_bundle(
        False,
        "Start each kernel with the L2 contents that the previous kernel left. Default: an empty "
        "L2.",
    )

    def model(self) -> L2Model:
        """Return these options as an `L2Model`."""
        return L2Model(
            *(self.launch, self.walk, self.blocks_per_sm, self.partitions),
            jitter=self.jitter * 1e-6,
            flush=not self.warm,
        )


ALGORITHM = (
    f"Algorithm: {', '.join(ALGORITHMS)}. In the backward pass, flash2 has three kernels without "
    "atomics; flash2-fused has one kernel that accumulates dQ with atomics, like the kernel of "
    "FlashAttention-2's authors; flash2-fused-first is the same without a pass that sets dQ to 0."
)
Algorithm = Annotated[str, typer.Option("--algorithm", "-a", help=ALGORITHM, rich_help_panel=_HOW)]


def algorithms(default: Any) -> Any:
    """Declare an option that takes several algorithms, separated by commas."""
    return option(
        default, f"Algorithms, separated by commas: {', '.join(ALGORITHMS)}.", "-a", panel=_HOW
    )


Backend = Annotated[
    str,
    typer.Option(
        help="Backend: simulator, numba (CPU), cupy or numba_cuda (NVIDIA GPU).",
        rich_help_panel=_HOW,
    ),
]
Device = Annotated[str, typer.Option(help=GPU, rich_help_panel=_HOW)]
Causal = Annotated[bool, typer.Option("--causal", help="Use a causal mask.", rich_help_panel=_MASK)]
Direction = Annotated[str, typer.Option(help=PASS, rich_help_panel=_HOW)]


# -- output ---------------------------------------------------------------------------------------


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
    """Options for the data to draw: saved traces, or algorithms to count or run on these sizes."""

    panel = _HOW
    trace: list[Path] | None = in_bundle(
        None,
        f"A saved trace, or a GPU's trace that is included in flashsim: {', '.join(TRACES)}. "
        "Repeat the option for two traces. Without a trace, pass sizes.",
        "-T",
    )
    sizes: Sizes = Sizes()
    tensors: Tensors = Tensors()
    mask: Mask = Mask()
    algorithm: str = in_bundle("flash2", "One or more algorithms, separated by commas.", "-a")
    how: One = One(tiling="same")
    execute: bool = in_bundle(
        False,
        "Simulate on tensors. By default, the same events are counted by formula, without tensors.",
    )

    def names(self) -> list[str]:
        """Return the list of algorithms' names."""
        return [name.strip() for name in self.algorithm.split(",")]

    def last(self) -> Source:
        """Return these options with only the last algorithm, for plots that show one."""
        return replace(self, algorithm=self.names()[-1])
