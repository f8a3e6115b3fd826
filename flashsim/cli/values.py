"""Convert the text of options to values: windows, tilings, devices, tensors, traces."""

import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashsim.api.arrays import expand
from flashsim.api.cost import Estimate, cost, fits
from flashsim.api.counting import count
from flashsim.api.dispatch import ON_CPU, backend_name
from flashsim.api.quantize import quantize
from flashsim.api.samples import TRACES, load_sample, load_sample_trace, random_inputs
from flashsim.api.scales import UNSCALED
from flashsim.cli import options as opt
from flashsim.cli.declare import flag, pair
from flashsim.counts.traffic import Traffic, compulsory
from flashsim.errors import FlashSimError, OptionError, ShapeError, choices
from flashsim.problem import checks
from flashsim.problem.checks import FP8
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule import plans
from flashsim.schedule.presets import PRESETS
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace


class Arrays(NamedTuple):
    """The input arrays of a command; `out` is a real model's output, for comparison."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray | None = None
    out: np.ndarray | None = None

    def gradient(self, seed: int) -> np.ndarray:
        """Return `dout` or, if there is none, a standard normal array of out's shape."""
        if self.dout is not None:
            return self.dout
        shape = (*self.q.shape[:-1], self.v.shape[-1])
        kind = numpy_dtype("bfloat16") if self.q.dtype.name in FP8 else self.q.dtype
        return np.random.default_rng(seed).standard_normal(shape).astype(kind)


def read_text(file: Path) -> str:
    """Return the text in a file that the user named, or raise `OptionError`."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise OptionError(f"cannot read {str(file)!r}: {error.strerror}") from None


def arrays(
    sizes: opt.Lengths, tensors: opt.Tensors, prefix: int | None = None, **instead: Any
) -> Arrays:
    """Return input arrays: from a file, from the demo data, or random with the user's sizes.

    In random arrays, all batch entries begin with the same `prefix` keys. `instead` replaces sizes
    of the random arrays.
    """
    typed, file, sample = sizes.given(), tensors.input, tensors.demo_data
    if file is not None and sample is not None:
        raise OptionError("--input and --demo-data both choose the tensors; pass only one of them")
    if typed and (file is not None or sample is not None):
        raise OptionError(
            f"the tensors in the file already determine the sizes; leave out {flags(typed)}"
        )
    if file is not None:
        return _read_file(file)
    if sample is not None:
        real = load_sample(sample)
        return Arrays(real.q, real.k, real.v, out=real.out)
    asked = Problem(**{"n_q": 512, **typed, **instead})
    fits(compulsory(asked), "use `flashsim count`, which needs no arrays")
    drawn = Arrays(*random_inputs(asked, tensors.seed))
    for x in (drawn.k, drawn.v):
        x[1:, :, : prefix or 0] = x[:1, :, : prefix or 0]
    return drawn


def check_seed(tensors: opt.Tensors, typed: Sequence[str], backward: bool) -> None:
    """Raise `OptionError` if --seed was typed, but nothing is drawn."""
    chosen = tensors.input is not None or tensors.demo_data is not None
    if chosen and not backward and "seed" in typed:
        raise OptionError(
            "with --input or --demo-data, --seed only draws the gradient of a backward pass; "
            "leave out --seed"
        )


def unscaled(arrays: Arrays) -> dict[str, Any]:
    """Return {"scales": ...} for random FP8 arrays, which have no scales; {} for other arrays."""
    return {"scales": UNSCALED} if arrays.q.dtype.name in FP8 else {}


def quantized(
    arrays: Arrays, scaling: opt.Scaling, rotate: bool, dtype: str | None
) -> tuple[Arrays, dict[str, Any]]:
    """Quantise the arrays to FP8 if --scales is set; return arrays, and options for `run`."""
    kind = scaling.kind()
    if kind is None:
        if rotate:
            raise OptionError(
                "--rotate rotates q and k before they are scaled, so it needs --scales; pass "
                "--scales too"
            )
        return arrays, unscaled(arrays)
    fp8 = quantize(
        *arrays[:3],
        granularity=kind if isinstance(kind, str) else "block",
        block=kind if isinstance(kind, tuple) else (1, 1),
        rotate="hadamard" if rotate else None,
        dtype=dtype or FP8[0],
    )
    dout = None if arrays.dout is None else arrays.dout.astype(numpy_dtype("bfloat16"))
    return arrays._replace(q=fp8.q, k=fp8.k, v=fp8.v, dout=dout), fp8.options


def cache(
    arrays: Arrays, how: opt.Decoding
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, dict[str, Any]]:
    """Return Q, K and V in the requested cache layout, and options of `run` for this layout.

    V is None if it is stored as columns of K.
    """
    q, k, v, options = _in_pages(arrays, how)
    if how.latent:
        return q, k, None, options | {"head_dim_v": v.shape[-1]}
    return q, k, v, options


def _in_pages(
    arrays: Arrays, how: opt.Decoding
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Return Q, K and V, and options of `run`; K and V are cut into pages of `page_size` keys.

    A prefix that all batch entries share is stored in the first entry's pages.
    """
    q, k, v = arrays[:3]
    if how.page_size is None:
        return q, k, v, {}
    size = checks.positive_int("--page-size", how.page_size)
    if not 2 <= q.ndim == k.ndim == v.ndim <= 4 or k.shape[:-1] != v.shape[:-1]:
        return q, k, v, {}  # `run` raises the error
    q, k, v = (expand(x) for x in (q, k, v))  # a block table has a row per batch entry
    batch, heads, n, _ = k.shape
    pages = -(-n // size)
    row = heads * (k.shape[-1] + v.shape[-1]) * k.itemsize
    fits(batch * pages * size * row, "use smaller pages, which leave less of the last page empty")
    pools = []
    for x in (k, v):
        room = np.zeros((batch, heads, pages * size, x.shape[-1]), x.dtype)
        room[:, :, :n] = x
        cut = room.reshape(batch, heads, pages, size, x.shape[-1]).swapaxes(1, 2)
        pools.append(cut.reshape(batch * pages, heads, size, x.shape[-1]))
    table = np.arange(batch * pages).reshape(batch, pages)
    table[:, : (how.shared_prefix or 0) // size] = table[0, : (how.shared_prefix or 0) // size]
    return q, pools[0], pools[1], {"block_table": table, "cache_seqlens": np.full(batch, n)}


def foresee(
    arrays: Arrays,
    mask: opt.Mask,
    algorithms: Iterable[str],
    tiles: Mapping[str, Tiling | None],
    device: Device,
    backend: str = "simulator",
) -> Estimate | None:
    """Return the passes' estimated cost; None for a GPU backend or invalid arrays.

    Passes that need more than this machine's memory raise an `OptionError`.
    """
    q, k, v = arrays[:3]
    backend = backend_name(backend)
    if backend not in ON_CPU or not 2 <= q.ndim == k.ndim == v.ndim <= 4:
        return None
    shape = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
    heads = (math.prod(q.shape[:-2]), math.prod(k.shape[:-2]))
    try:
        whole = Problem(*shape, 1, *heads, q.dtype.name, mask.causal, window(mask))
        passes = [
            count(whole, algorithm=name, direction=direction, tiling=tile, device=device)
            for name in algorithms
            for direction, tile in tiles.items()
        ]
    except FlashSimError:
        return None  # `run` raises the error, about the user's own arrays
    return cost(passes, backend)


def problem(sizes: opt.Lengths, mask: opt.Mask) -> Problem:
    """Return the `Problem` with the user's sizes and mask."""
    softcap = mask.softcap if isinstance(mask, opt.Scores) else 0.0
    return Problem(**sizes.given(), causal=mask.causal, window=window(mask), softcap=softcap)


def problem_of(arrays: Arrays, mask: opt.Mask) -> Problem:
    """Return the `Problem` of one head of these arrays, enough for choosing a tiling."""
    q, k, v = arrays[:3]
    if min(x.ndim for x in (q, k, v)) < 2:
        raise ShapeError(
            f"q, k and v must have at least 2 axes, got shapes {q.shape}, {k.shape}, {v.shape}"
        )
    sizes = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    return Problem(*sizes, dtype=q.dtype.name, causal=mask.causal)


def counted(
    sizes: opt.Lengths,
    mask: opt.Mask,
    algorithm: str,
    how: opt.One,
    decoding: opt.Decoding | None = None,
    among: Sequence[str] = (),
) -> Traffic:
    """Count a pass by formula; with --tiling same, the tile fits all algorithms in `among`."""
    machine = Device.get(how.device)
    decoding = decoding or opt.Decoding()
    whole = decoding.posed(problem(sizes, mask))
    return count(
        whole,
        algorithm=algorithm,
        direction=how.direction,
        tiling=one_tiling(how.tiling, whole, among or [algorithm], [how.direction], machine),
        device=machine,
        **decoding.options(),
    )


def decoding_of(names: Sequence[str], decoding: opt.Decoding) -> list[tuple[str, opt.Decoding]]:
    """Return a list of pairs: an algorithm, and its decoding options.

    If some algorithms split keys, `decoding` applies only to these, otherwise to all.
    """
    splitting = any(map(plans.splits_keys, map(plans.check_algorithm, names)))
    plain = opt.Decoding()
    return [(n, plain if splitting and not plans.splits_keys(n) else decoding) for n in names]


def window(mask: opt.Mask) -> tuple[int, int] | None:
    """Return the mask's window as numbers, or None."""
    return None if mask.window is None else parse_window(mask.window)


def flags(names: Iterable[str]) -> str:
    """Return the names of options in the form that the user types, for error messages."""
    return ", ".join(map(flag, names))


def _read_file(file: Path) -> Arrays:
    try:
        if file.is_file() and not zipfile.is_zipfile(file):  # NumPy's error would mention pickles
            raise ValueError("it is not a zip archive")
        with np.load(file, allow_pickle=False) as stored:
            contents = {name: stored[name] for name in stored.files}
    except OSError as error:
        raise OptionError(f"cannot read {str(file)!r}: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise OptionError(
            f"{file} is not an .npz file of plain arrays ({error}); write it with np.savez(path, "
            "q=q, k=k, v=v)"
        ) from None
    missing = [name for name in "qkv" if name not in contents]
    if missing:
        raise ShapeError(
            f"{file} must contain arrays q, k and v (and may contain dout), got "
            f"{', '.join(contents) or 'none'}; add {', '.join(missing)}"
        )
    return Arrays(contents["q"], contents["k"], contents["v"], contents.get("dout"))


def parse_size(name: str, text: str) -> tuple[float, float]:
    """Parse a size ``WIDTHxHEIGHT`` in inches."""
    takes = "WIDTHxHEIGHT, 1 to 100 inches, e.g. 9.6x5.4"
    size = pair("x", float, takes)(name, text)
    if not all(1 <= side <= 100 for side in size):
        raise OptionError(f"{name} must be {takes}, got {text!r}")
    return size


def parse_window(text: str) -> tuple[int, int] | None:
    """Parse a window ``LEFT:RIGHT``, or "none"."""
    if text == "none":
        return None
    return pair(":", int, "LEFT:RIGHT, e.g. 128:0 (-1 means no limit)")("--window", text)


def parse_mask(text: str) -> bool:
    """Return whether a mask is causal, from the text "full" or "causal"."""
    masks = {"full": False, "causal": True}
    return masks[checks.one_of("mask", text, masks)]


def parse_tiling(text: str) -> Tiling | str:
    """Return the Tiling of a text such as ``128x64``; return "fit" and preset names unchanged.

    A third number is `Tiling.dq_rows`.
    """
    if text == "fit" or text in PRESETS:
        return text
    takes = f"QUERIESxKEYS, e.g. 128x64, or a name from {choices(text, ('fit', *PRESETS))}"
    try:
        queries, keys, *dq_rows = map(int, text.lower().split("x"))
        (rows,) = dq_rows or (None,)
    except ValueError:
        raise OptionError(f"--tiling must be {takes}, got {text!r}") from None
    return Tiling(queries, keys, rows)


def tiling(text: str, head_dim: int, causal: bool) -> Tiling | None:
    """Return the tiling that an option's text names, for one run; None for "fit"."""
    parsed = parse_tiling(text)
    if isinstance(parsed, Tiling):
        return parsed
    return None if parsed == "fit" else Tiling.preset(parsed, head_dim, causal=causal)


def tilings(how: opt.Passes, whole: Problem, algorithms: Sequence[str]) -> dict[str, Tiling | None]:
    """Return the tiling of each pass, by direction."""
    if how.backward_tiling not in ("fit", "same") and not how.backward:
        raise OptionError(
            "--backward-tiling sets the tiles of the backward pass, so it needs --backward; "
            "pass --backward too"
        )
    texts = {"forward": how.tiling, **({"backward": how.backward_tiling} if how.backward else {})}
    return {
        direction: Tiling.common(whole, device(how), algorithms, [*texts])
        if text == "same"
        else tiling(text, whole.head_dim, whole.causal)
        for direction, text in texts.items()
    }


def one_tiling(
    text: str, whole: Problem, algorithms: Sequence[str], directions: Sequence[str], on: Device
) -> Tiling | None:
    """Return one tiling for all algorithms; None for "fit": each algorithm chooses its own."""
    if text == "same":
        return Tiling.common(whole, on, algorithms, directions)
    return tiling(text, whole.head_dim, whole.causal)


def device(how: opt.Passes) -> Device:
    """Return the device, with its on-chip memory size changed if `how` sets one."""
    machine = Device.get(how.device)
    sram = how.sram if isinstance(how, opt.Simulated) else None
    return machine if sram is None else machine.with_sram(sram)


def duration(trace: Trace) -> float | None:
    """Return the seconds from a timeline's start to its end; None without a timeline."""
    spans = trace.timeline
    if spans is None or not len(spans):
        return None
    return float(spans["end_ns"].max() - spans["start_ns"].min()) * 1e-9


def load_trace(file: Path) -> Trace:
    """Load a saved trace or, if no such file exists, the bundled trace of that name."""
    bundled = str(file) in TRACES and not file.exists()
    return load_sample_trace(str(file)) if bundled else Trace.load(file)
