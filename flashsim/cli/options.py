"""What the commands of `flashsim` have in common: options, and how their text becomes values."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import typer

from flashsim.api.samples import SAMPLES, TRACES, load_sample, load_sample_trace, random_inputs
from flashsim.errors import FlashSimError, OptionError, ShapeError, choices
from flashsim.l2.launch import ORDERS, WALKS
from flashsim.problem.checks import DTYPES
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.plans import ALGORITHMS
from flashsim.schedule.presets import PRESETS
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace

T = TypeVar("T")


def _option(kind: Any, *names: str, help: str, panel: str) -> Any:
    return Annotated[kind, typer.Option(*names, help=help, rich_help_panel=panel)]


_SIZES, _MASK, _HOW, _OUTPUT = "Sizes", "Mask and scores", "How", "Output"
_L2 = "L2 cache"

Nq = _option(int | None, "--n-q", "-n", help="Queries.", panel=_SIZES)
Nkv = _option(int | None, "--n-kv", help="Keys; as many as queries.", panel=_SIZES)
HeadDim = _option(int | None, "--head-dim", "-d", help="Width of q and k rows.", panel=_SIZES)
HeadDimV = _option(int | None, "--head-dim-v", help="Width of v rows; as q.", panel=_SIZES)
Batch = _option(int | None, "--batch", "-b", help="Batch size.", panel=_SIZES)
Heads = _option(int | None, "--heads", "-h", help="Query heads.", panel=_SIZES)
KvHeads = _option(int | None, "--kv-heads", help="Key heads; as query heads.", panel=_SIZES)
Dtype = _option(str | None, "--dtype", help=f"One of {', '.join(DTYPES)}.", panel=_SIZES)
Seed = _option(int, "--seed", help="Of the random tensors.", panel=_SIZES)
Input = _option(
    Path | None,
    "--input",
    help="An .npz file with arrays q, k, v (and dout), instead of random tensors.",
    panel=_SIZES,
)
DemoData = _option(
    str | None,
    "--demo-data",
    help=f"Bundled tensors of a real model: {' or '.join(SAMPLES)}.",
    panel=_SIZES,
)
Causal = _option(bool, "--causal", help="Key k <= query + n_kv - n_q.", panel=_MASK)
Window = _option(
    str | None, "--window", help="LEFT:RIGHT keys each query sees; -1 unlimited.", panel=_MASK
)
Softcap = _option(float, "--softcap", help="c of c tanh(s / c); 0 is off.", panel=_MASK)
Scale = _option(float | None, "--scale", help="On Q K^T; 1 / sqrt(head_dim).", panel=_MASK)
Algorithm = _option(str, "--algorithm", "-a", help=f"{', '.join(ALGORITHMS)}.", panel=_HOW)
Backward = _option(bool, "--backward", help="The backward pass as well.", panel=_HOW)
BackwardInstead = _option(
    bool, "--backward", help="The backward pass instead of the forward.", panel=_HOW
)
Tile = _option(
    str,
    "--tiling",
    "-t",
    help=f"QUERIESxKEYS, e.g. 128x64; fit; or a kernel's: {', '.join(PRESETS)}. Forward pass.",
    panel=_HOW,
)
BackwardTile = _option(str, "--backward-tiling", help="The same for the backward.", panel=_HOW)
DeviceName = _option(str, "--device", help="See `flashsim devices`.", panel=_HOW)
KernelTile = _option(
    str, "--tiling", "-t", help="QUERIESxKEYS; fit: the one that the kernels choose.", panel=_HOW
)
KernelAlgorithm = _option(
    str, "--algorithm", "-a", help="flash2, or flash2-fused: backward in one pass.", panel=_HOW
)
Family = _option(str, "--kernel", help="Kernels of backend cupy: hopper or portable.", panel=_HOW)
Sram = _option(int | None, "--sram", help="Bytes on chip, instead of the device's.", panel=_HOW)
KeyOrder = _option(str, "--key-order", help="ascending or descending.", panel=_HOW)
Backend = _option(str, "--backend", help="What executes it; numpy is the simulator.", panel=_HOW)
Json = _option(bool, "--json", help="Print JSON instead of tables.", panel=_OUTPUT)
Csv = _option(bool, "--csv", help="Print CSV instead of tables.", panel=_OUTPUT)
Save = _option(
    Path | None,
    "--save",
    help="Write the trace to this .npz file (a backward trace to NAME-backward.npz).",
    panel=_OUTPUT,
)

Launch = _option(str, "--launch", help=f"Order of blocks: {', '.join(ORDERS)}.", panel=_L2)
Walk = _option(str, "--walk", help=f"Order of a block's visits: {', '.join(WALKS)}.", panel=_L2)
BlocksPerSm = _option(int | None, "--blocks-per-sm", help="Blocks an SM; what fits.", panel=_L2)
Partitions = _option(int | None, "--partitions", help="1 or 2; the device's.", panel=_L2)
Jitter = _option(float, "--jitter", help="How far a visit's time strays, in µs.", panel=_L2)
Warm = _option(bool, "--warm", help="A stage finds in L2 what the last one left.", panel=_L2)
L2Sizes = _option(
    str | None, "--l2-sizes", help="MiB, e.g. 10,20,50: DRAM bytes at each size.", panel=_L2
)


class Arrays(NamedTuple):
    """What a command runs on; `out` is a real model's output, to hold ours against."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray | None = None
    out: np.ndarray | None = None

    def gradient(self, seed: int) -> np.ndarray:
        """`dout`, or a standard normal one of out's shape."""
        if self.dout is not None:
            return self.dout
        shape = (*self.q.shape[:-1], self.v.shape[-1])
        return np.random.default_rng(seed).standard_normal(shape).astype(self.q.dtype)


def read_text(file: Path) -> str:
    """The text of a file that the user named.

    Raises
    ------
    OptionError
        If it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise OptionError(f"cannot read {str(file)!r}: {error.strerror}") from None


def read_arrays(sizes: dict[str, Any], seed: int, file: Path | None, sample: str | None) -> Arrays:
    """Arrays from a file, of the bundled model, or random ones of the sizes that are not None."""
    given = {name: value for name, value in sizes.items() if value is not None}
    if file is not None and sample is not None:
        raise OptionError("--input and --demo-data both say which tensors; give one of them")
    if given and (file is not None or sample is not None):
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise OptionError(f"the sizes come from the tensors given; leave out {names}")
    if file is not None:
        return _read_file(file)
    if sample is not None:
        real = load_sample(sample)
        return Arrays(real.q, real.k, real.v, out=real.out)
    return Arrays(*random_inputs(Problem(**{"n_q": 512, **given}), seed))


def _read_file(file: Path) -> Arrays:
    try:
        with np.load(file, allow_pickle=False) as stored:
            found = {name: stored[name] for name in stored.files}
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise OptionError(
            f"{file} is not an .npz file of plain arrays ({error}); np.savez(path, q=q, k=k, v=v) "
            "writes one"
        ) from None
    missing = [name for name in "qkv" if name not in found]
    if missing:
        raise ShapeError(
            f"{file} must hold arrays q, k and v (and may hold dout), got "
            f"{', '.join(found) or 'none'}; missing: {', '.join(missing)}"
        )
    return Arrays(found["q"], found["k"], found["v"], found.get("dout"))


def parse_list(name: str, text: str, convert: Callable[[str], T]) -> list[T]:
    """The values of ``a,b,c``; an error names the option."""
    try:
        return [convert(part.strip()) for part in text.split(",")]
    except FlashSimError:
        raise
    except ValueError:
        raise OptionError(
            f"--{name} takes values separated by commas, e.g. 1024,2048; got {text!r}"
        ) from None


def parse_range(name: str, text: str) -> tuple[int, int]:
    """``FIRST:LAST``; an error names the option."""
    try:
        first, last = (int(side) for side in text.split(":"))
    except ValueError:
        raise OptionError(f"--{name} takes FIRST:LAST, e.g. 0:3, got {text!r}") from None
    return first, last


def parse_times(text: str) -> tuple[float, float]:
    """``FIRST:LAST`` in microseconds."""
    try:
        first, last = (float(side) for side in text.split(":"))
    except ValueError:
        raise OptionError(f"--times takes FIRST:LAST in µs, e.g. 0:40, got {text!r}") from None
    return first, last


def parse_window(text: str) -> tuple[int, int] | None:
    """``LEFT:RIGHT``, or "none"."""
    if text == "none":
        return None
    try:
        left, right = (int(side) for side in text.split(":"))
    except ValueError:
        raise OptionError(
            f"--window takes LEFT:RIGHT, e.g. 128:0 (-1 is unlimited), got {text!r}"
        ) from None
    return left, right


def parse_tiling(text: str) -> Tiling | str:
    """``128x64`` as a Tiling; "fit" and the names of presets as they are."""
    if text == "fit" or text in PRESETS:
        return text
    try:
        block_q, block_k = (int(side) for side in text.lower().split("x"))
    except ValueError:
        raise OptionError(
            f"--tiling takes QUERIESxKEYS, e.g. 128x64, or a name, got {text!r}; "
            + choices(text, ("fit", *PRESETS))
        ) from None
    return Tiling(block_q, block_k)


def parse_yes(text: str) -> bool:
    """Yes or no."""
    words = {"yes": True, "true": True, "no": False, "false": False}
    if text.lower() not in words:
        raise OptionError(f"expected yes or no, got {text!r}")
    return words[text.lower()]


def choose_tiling(text: str, head_dim: int, causal: bool) -> Tiling | None:
    """The tiling for one run; None for the one that fits."""
    tiling = parse_tiling(text)
    if isinstance(tiling, Tiling):
        return tiling
    return None if tiling == "fit" else Tiling.preset(tiling, head_dim, causal=causal)


def load_trace(file: Path) -> Trace:
    """A saved trace; a bundled one by its name, unless a file has it."""
    bundled = str(file) in TRACES and not file.exists()
    return load_sample_trace(str(file)) if bundled else Trace.load(file)


def choose_device(name: str, sram: int | None) -> Device:
    """The device, with another on-chip capacity if one is given."""
    device = Device.get(name)
    return device if sram is None else device.with_sram(sram)
