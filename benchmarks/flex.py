"""Time mask and score functions on a GPU: flashsim beside torch's FlexAttention.

    python benchmarks/flex.py [--rows "causal;..."] [--head-dims 128,64] [--n 4096] [--csv flex.csv]
                              [--only functions,named,flex] [--tilings]

Prints a table and writes a CSV. Each row is a mask and a score function. `functions` is
`flashsim.run(mask_mod=, score_mod=)`. `named` is the same kernels with a built-in mask (if the mask
has no name, the nearer of causal and none). `flex` is FlexAttention under torch.compile. `python
hopper` and `python tensor` are the kernels of ``backend="numba_cuda"``. Inputs are bfloat16, 16,384
tokens, heads = 2048 / d. Implementations are interleaved in a new order in each repetition, after a
spinning kernel, so that only the GPU's time is measured. TFLOP/s count only scores that the mask
keeps: 4 B H d per score forward, 2.5 times that backward. `--tilings` times `functions` with each
tiling of the forward kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_lab import TorchLab, csv_file, medians
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashsim

TOKENS, D_MODEL = 16384, 2048
FACTORS = {"forward": 1.0, "backward": 2.5}
COLUMNS = (
    *("row", "head_dim", "batch", "heads", "n", "kept", "direction", "implementation", "tiling"),
    *("ms", "tflops", "first_call_s", "gpu"),
)


class Row(NamedTuple):
    """A mask and a score function, or factories that build them from integer or float arrays.

    `named` are options of `flashsim.run` with the same mask, or the nearest one.
    """

    mask: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None
    named: dict[str, Any] = {}  # noqa: RUF012 (never written to)


def causal(b, h, q, k):
    """Keep keys up to the query."""
    return q >= k


def window(b, h, q, k):
    """Keep the last 1,024 keys."""
    return (q >= k) & (q - k <= 1023)


def prefix(b, h, q, k):
    """Keep the first 1,024 keys, and keys up to the query."""
    return (k < 1024) | (q >= k)


def documents(batch, heads, n, integers):
    """Return a mask of causal documents of 700 tokens."""
    of = integers(np.arange(n, dtype=np.int32) // 700)

    def mask(b, h, q, k):
        return (of[q] == of[k]) & (q >= k)

    return mask


def padding(batch, heads, n, integers):
    """Return a causal mask of sequences of different lengths."""
    lengths = integers(np.array([n - 300 * b for b in range(batch)], np.int32))

    def mask(b, h, q, k):
        return (k < lengths[b]) & (q >= k)

    return mask


def alibi(batch, heads, n, floats):
    """Return ALiBi, with a slope per head."""
    slopes = floats(2.0 ** (-8 * np.arange(1, heads + 1) / heads))

    def score(s, b, h, q, k):
        return s + slopes[h] * (k - q)

    return score


def table(batch, heads, n, floats):
    """Return a score function with a table of relative positions per head."""
    values = floats(np.random.default_rng(0).standard_normal((heads, 2 * n)))

    def score(s, b, h, q, k):
        return s + values[h, q - k + n]

    return score


def bias(batch, heads, n, floats):
    """Return a score function with a bias per query and key, shared by heads and sequences."""
    values = floats(np.random.default_rng(0).standard_normal((n, n)))

    def score(s, b, h, q, k):
        return s + values[q, k]

    return score


def softcap(s, b, h, q, k):
    """Cap scores at 30."""
    return 30 * torch.tanh(s / 30)


CAUSAL = {"causal": True}
ROWS = {
    "none": Row(),
    "causal": Row(causal, None, CAUSAL),
    "window 1024": Row(window, None, {"window": (1023, 0)}),
    "documents of 700": Row(documents, None, CAUSAL),
    "prefix 1024": Row(prefix, None, CAUSAL),
    "padding": Row(padding, None, CAUSAL),
    "causal, ALiBi": Row(causal, alibi, CAUSAL),
    "causal, softcap 30": Row(causal, softcap, {"causal": True, "softcap": 30.0}),
    "causal, table": Row(causal, table, CAUSAL),
    "none, ALiBi": Row(None, alibi),
    "none, bias": Row(None, bias),
}
#: Kernels in Python, by the name of their implementation.
PYTHON = {"python hopper": "hopper", "python tensor": "tensor"}
#: Functions that need no arrays.
PLAIN = (causal, window, prefix, softcap)


class Inputs(NamedTuple):
    """The tensors of one row, and its functions for flashsim and for FlexAttention."""

    q: Any
    k: Any
    v: Any
    dout: Any
    mask: Any
    score: Any
    own_mask: Any

    @classmethod
    def of(cls, row: Row, d: int, n: int) -> Inputs:
        """Return random tensors and the functions of a row.

        flashsim reads a mask's arrays once, in the CPU's memory; FlexAttention reads them on the
        GPU.
        """
        batch, heads = max(1, TOKENS // n), D_MODEL // d
        make = {"device": "cuda", "dtype": torch.bfloat16}
        q, k, v, dout = (torch.randn(batch, heads, n, d, **make) for _ in range(4))

        def made(function: Any, convert: Callable[[np.ndarray], Any]) -> Any:
            if function is None or function in PLAIN:
                return function
            return function(batch, heads, n, convert)

        def on_gpu(x: np.ndarray) -> Any:
            return torch.as_tensor(x).to("cuda", torch.float32 if x.dtype.kind == "f" else None)

        return cls(
            *(q, k, v, dout, made(row.mask, on_gpu), made(row.score, on_gpu)),
            made(row.mask, np.asarray),
        )


class Contender(NamedTuple):
    """One implementation: its forward, and a function that returns its backward."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Callable[[], Any]]
    kept_for_backward: Callable[[], Any]


def ours(x: Inputs, options: dict[str, Any]) -> Contender:
    """Return `flashsim.run` with these options."""
    given = {"backend": "cupy", **options}

    def forward() -> Any:
        return flashsim.run(x.q, x.k, x.v, **given)

    def backward(result: Any) -> Callable[[], Any]:
        return lambda: result.backward(x.dout, deterministic=False)

    return Contender(forward, backward, forward)


def flex(x: Inputs) -> Contender:
    """Return FlexAttention under torch.compile, with a block mask computed beforehand."""
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    batch, _, n, _ = x.q.shape
    blocks = None
    if x.mask is not None:
        per_sequence = batch if x.mask.__qualname__.startswith("padding") else None
        blocks = create_block_mask(x.mask, per_sequence, None, n, n, device="cuda")

    def call(*qkv: Any) -> Any:
        return compiled(*qkv, score_mod=x.score, block_mask=blocks)

    def forward() -> Any:
        with torch.no_grad():
            return call(x.q, x.k, x.v)

    held = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]

    def backward(out: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(out, held, x.dout, retain_graph=True)

    return Contender(forward, backward, lambda: call(*held))


def kept_scores(x: Inputs) -> int:
    """Return the number of scores that the mask keeps, over all sequences and heads."""
    batch, heads, n, _ = x.q.shape
    if x.mask is None:
        return batch * heads * n * n
    at = torch.arange(n, device="cuda")
    total = 0
    for b in range(batch):
        for first in range(0, n, 1024):
            rows = at[first : first + 1024, None]
            number = torch.full_like(rows, b)
            total += int(x.mask(number, torch.zeros_like(rows), rows, at).expand(-1, n).sum())
    return total * heads


def contenders(row: Row, x: Inputs, names: list[str], tilings: bool) -> dict[str, Any]:
    """Return functions that build each implementation of a row, by name."""
    functions = {"mask_mod": x.own_mask, "score_mod": x.score}
    made: dict[str, Any] = {}
    if "named" in names:
        made["named"] = lambda: ours(x, row.named)
    if "functions" in names and (row.mask or row.score):
        made["functions"] = lambda: ours(x, functions)
        if tilings:
            for tiling in ((128, 128), (192, 128), (128, 176), (128, 208)):
                which = functions | {"tiling": flashsim.Tiling(*tiling)}
                made[f"functions {tiling[0]} x {tiling[1]}"] = lambda o=which: ours(x, o)
    for name, kernel in PYTHON.items():
        if name in names:
            which = functions | {"backend": "numba_cuda", "kernel": kernel}
            made[name] = lambda o=which: ours(x, o)
    if "flex" in names:
        made["flex"] = lambda: flex(x)
    return made


def measure(name: str, d: int, n: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of the CSV for one mask and score function."""
    lab, row = TorchLab(), ROWS[name]
    x = Inputs.of(row, d, n)
    kept = kept_scores(x)
    batch, heads = x.q.shape[:2]
    common = {"row": name, "head_dim": d, "batch": batch, "heads": heads, "n": n, "gpu": lab.name}
    common["kept"] = round(kept / (batch * heads * n * n), 4)
    alive: dict[str, Contender] = {}
    for which, make in contenders(row, x, options.only, options.tilings).items():
        try:
            alive[which] = make()
        except Exception as error:
            print(f"  {which}: {type(error).__name__}: {str(error)[:300]}")
    found = []
    for direction in FACTORS:
        work, first, tiling = {}, {}, {}
        for which, one in list(alive.items()):
            if direction == "backward" and which.startswith("functions "):
                continue
            try:
                began = time.perf_counter()
                if direction == "forward":
                    work[which] = one.forward
                    tiling[which] = str(getattr(one.forward(), "tiling", ""))
                else:
                    work[which] = one.backward(one.kept_for_backward())
                    tiling[which] = str(getattr(work[which](), "tiling", ""))
                torch.cuda.synchronize()
                first[which] = time.perf_counter() - began
            except Exception as error:
                print(f"  {which}, {direction}: {type(error).__name__}: {str(error)[:300]}")
                work.pop(which, None)
                alive.pop(which)
        flops = FACTORS[direction] * 4 * kept * d
        for which, us in medians(lab, work, options.repetitions).items():
            ms = us / 1e3
            found.append(
                common
                | {"direction": direction, "implementation": which, "ms": round(ms, 4)}
                | {"tflops": round(flops / ms / 1e9, 1), "first_call_s": round(first[which], 2)}
                | {"tiling": tiling[which]}
            )
    said = "; ".join(f"{r['implementation']} {r['direction'][0]} {r['tflops']:.0f}" for r in found)
    print(f"d={d} N={n} {name} ({common['kept']:.3f} kept): {said}", flush=True)
    return found


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default=";".join(ROWS), help="names, separated by semicolons")
    parser.add_argument("--head-dims", default="128,64")
    parser.add_argument("--n", default="4096")
    parser.add_argument("--only", default="functions,named,flex", type=lambda s: s.split(","))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no row after so many seconds"
    )
    parser.add_argument("--tilings", action="store_true")
    parser.add_argument("--csv", type=Path, default=Path("flex.csv"))
    options = parser.parse_args()
    began = time.perf_counter()
    with csv_file(options.csv, COLUMNS) as write:
        for n in map(int, options.n.split(",")):
            for d in map(int, options.head_dims.split(",")):
                for name in options.rows.split(";"):
                    if time.perf_counter() - began > options.seconds:
                        print(f"skipped for lack of time: {name}, d={d}, N={n}")
                        continue
                    write(*measure(name, d, n, options))
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
