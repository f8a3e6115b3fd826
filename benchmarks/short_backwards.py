r"""Compare all forms of short backwards: needs a Hopper GPU and CuPy.

    python benchmarks/short_backwards.py --csv docs/data/short-backwards-h100.csv [--jobs 14] \
        [--few 3] [--seconds 300]

There are 24 shapes of 100 to 600 tokens. Forms are three passes ("flash2") or the fused pass, with
the rule's tile or another one, in clusters of one to eight blocks. Where the fused pass leaves SMs
idle, the kernel that converts dQ may start early. Beside them run the rule's form, and
flash-attention's CuTe kernels if they are installed. All are interleaved after a spinning kernel
that hides the host's time; `us` is the median of 9. Gradients that differ from the rule's by more
than 2 % of the largest are printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from forced import Forced, backward, forced, forward, kernels
from forms import Shape
from gpu_compile import compile_all
from gpu_implementations import Cute, Inputs
from gpu_lab import csv_file, medians, open_lab

from flashsim import Tiling
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy.family import fastest_backward
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.engines.protocol import Job

COLUMNS = (
    *("head_dim", "batch", "heads", "kv_heads", "n", "causal", "window"),
    *("algorithm", "tile", "clusters", "early_conversion", "us"),
)
#: (head_dim, causal, tokens, batch, heads, kv_heads, window with the query's own position)
SHAPES = (
    *((32, True, 136, 1, 56, 56, 65), (32, True, 223, 1, 40, 40, 96)),
    *((128, True, 464, 2, 16, 2, 0), (32, True, 150, 1, 48, 48, 0)),
    *((64, True, 136, 1, 56, 56, 65), (64, False, 140, 1, 60, 60, 0)),
    *((64, True, 190, 2, 24, 24, 0), (80, True, 200, 1, 40, 40, 100)),
    *((96, True, 250, 2, 16, 16, 0), (128, True, 160, 1, 32, 32, 0)),
    *((128, False, 220, 1, 28, 28, 0), (128, True, 400, 1, 16, 4, 0)),
    *((128, True, 464, 4, 8, 1, 0), (64, True, 464, 2, 16, 2, 0)),
    *((64, False, 277, 1, 32, 8, 0), (128, True, 500, 2, 24, 3, 0)),
    *((32, True, 300, 2, 28, 7, 0), (80, True, 320, 2, 16, 4, 80)),
    *((128, True, 600, 1, 40, 5, 0), (96, False, 350, 1, 64, 8, 0)),
    *((32, True, 500, 1, 24, 24, 0), (128, True, 136, 1, 60, 60, 65)),
    *((128, False, 385, 2, 16, 16, 0), (64, True, 320, 1, 12, 12, 0)),
)
REPETITIONS, CALLS = 9, 3
#: The largest number of blocks of a launch in clusters.
MOST_BLOCKS = 200


class Form(NamedTuple):
    """A form of the backward; `clusters` lists pairs (blocks per work tile, work tiles)."""

    algorithm: str
    tile: Tiling
    clusters: tuple[tuple[int, int], ...]
    early: bool

    @property
    def family(self) -> Forced:
        """The kernel family with this form's decisions."""
        return forced(tile=self.tile, shared=self.clusters, early=self.early)

    @property
    def row(self) -> dict[str, Any]:
        """The form's columns."""
        clusters = " then ".join(str(blocks) for blocks, _ in self.clusters)
        named = {"algorithm": self.algorithm, "tile": str(self.tile), "clusters": clusters}
        return named | {"early_conversion": self.early}


def shapes() -> list[Shape]:
    """Return the 24 shapes."""
    return [Shape(d, c, n, n, *heads, w) for d, c, n, *heads, w in SHAPES]


def shape_row(shape: Shape) -> dict[str, Any]:
    """Return a shape's columns."""
    sizes = shape._asdict() | {"n": shape.n_q, "window": shape.window or ""}
    return {name: sizes[name] for name in COLUMNS[:7]}


def other_tile(shape: Shape, algorithm: str) -> Tiling | None:
    """Return a tile that is not the rule's, or None."""
    if shape.head_dim <= 32 or (algorithm == "flash2" and shape.head_dim > 64):
        return None
    return Tiling(64, 128) if shape.head_dim <= 80 else Tiling(80, 128)


def forms(shape: Shape, gpu: Gpu) -> Iterator[Form]:
    """Yield all forms of a shape's backward."""
    most, at_once = gpu.multiprocessors, dict(gpu.clusters)
    for algorithm in ("flash2", "flash2-fused"):
        tile, items = outer(shape, algorithm, HOPPER, gpu)
        launches: list[tuple[tuple[int, int], ...]] = [((1, items),)]
        if items < most:
            launches += [((c, items),) for c in (2, 4, 8) if c * items <= MOST_BLOCKS]
        half = items // 2
        if algorithm == "flash2" and shape.problem.group > 1:
            for c in (8, 4):
                fits = half <= at_once.get(c, 0) and c * half + c // 2 * (items - half) <= most
                launches += [((c, half), (c // 2, items - half))] * fits
        for clusters in launches:
            yield Form(algorithm, tile, clusters, early=False)
            taken = clusters[0][0] * items
            if algorithm == "flash2-fused" and taken <= most:
                yield Form(algorithm, tile, clusters, early=True)
    for algorithm in ("flash2", "flash2-fused"):
        if tile := other_tile(shape, algorithm):
            _, items = outer(shape, algorithm, forced(tile=tile), gpu)
            yield Form(algorithm, tile, ((1, items),), early=False)
            if algorithm == "flash2-fused" and items <= most:
                yield Form(algorithm, tile, ((1, items),), early=True)


def passes(shape: Shape, algorithm: str, family: Any, gpu: Gpu) -> tuple[Any, ...]:
    """Return the launches of a backward."""
    return family.backward_passes(shape.problem, None, gpu, "ascending", "", algorithm)


def outer(shape: Shape, algorithm: str, family: Any, gpu: Gpu) -> tuple[Tiling, int]:
    """Return the tile and the number of work tiles of a backward's KV-outer pass."""
    found = passes(shape, algorithm, family, gpu)
    one = next(x for x in found if x.stage.outer == "keys" and x.kernel.shared_bytes)
    return one.tables.schedule.tiling, one.walks * one.tables.tiles


def rule(shape: Shape, gpu: Gpu) -> str:
    """Return the algorithm that ``backward(deterministic=False)`` selects."""
    return fastest_backward(shape.problem, gpu, lambda _: HOPPER, "flash2", False, tiled=False)[0]


def works(
    lab: Any, shape: Shape, found: list[Form], gpu: Gpu
) -> dict[str, tuple[dict[str, Any], Callable[[], Any]]]:
    """Return the columns and the call of every backward of a shape, by a name."""
    p = shape.problem
    q, dout = (lab.array((p.batch, p.heads, p.n_q, p.head_dim), p.dtype) for _ in range(2))
    k, v = (lab.array((p.batch, p.kv_heads, p.n_kv, p.head_dim), p.dtype) for _ in range(2))
    ran, job, ruled = forward(p, q, k, v, HOPPER)(), Job(p, q, k, v), rule(shape, gpu)
    call = backward(ran, job, ruled, dout, HOPPER)
    calls = {"rule": ({"algorithm": f"{ruled}, by the rule"}, call)}
    expected = gradients(call)
    for form in found:
        call = backward(ran, job, form.algorithm, dout, form.family)
        apart = max(
            float(abs(mine - rules).max() / abs(rules).max())
            for mine, rules in zip(gradients(call), expected, strict=True)
        )
        if not apart < 0.02:
            print(f"WRONG by {apart:.1%}: {shape} {form.row}")
        calls[str(form)] = form.row, call
    try:
        cute, x = Cute(), Inputs(q, k, v, dout, p.causal, shape.window)
        theirs = partial(cute.backward, x, cute.forward(x))
        theirs()
        calls["cute"] = {"algorithm": "flash-attn cute"}, theirs
    except Exception as error:  # not installed, or no such shape
        print(f"flash-attn cute: {type(error).__name__}: {error}"[:200])
    return calls


def gradients(call: Callable[[], Any]) -> list[Any]:
    """Return the gradients of a backward in float32."""
    found = (call().arrays[name] for name in ("dq", "dk", "dv"))
    return [x.float() if hasattr(x, "float") else x.astype("float32") for x in found]


def main() -> None:
    """Compile, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--few", type=int, help="maximum number of shapes")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument(
        "--seconds", type=float, default=300, help="start no shape after so many seconds"
    )
    chosen = parser.parse_args()
    from flashsim.backends.cupy_gpu import engine

    gpu, began = engine.gpu_of(0), time.monotonic()
    asked = [(shape, list(forms(shape, gpu))) for shape in shapes()[: chosen.few]]
    made = list[Any]()
    for shape, found in asked:
        made += HOPPER.forward_passes(shape.problem, None, gpu, "ascending", "")
        made += passes(shape, rule(shape, gpu), HOPPER, gpu)
        for form in found:
            made += passes(shape, form.algorithm, form.family, gpu)
    compile_all(kernels(made), chosen.jobs)
    lab, _ = open_lab()
    with csv_file(chosen.csv, COLUMNS) as write:
        for done, (shape, found) in enumerate(asked):
            if time.monotonic() - began > chosen.seconds:
                print(f"out of time: {len(asked) - done} shapes were not measured")
                break
            calls = works(lab, shape, found, gpu)
            took = medians(
                lab, {name: call for name, (_, call) in calls.items()}, REPETITIONS, CALLS
            )
            for name, (row, _) in calls.items():
                row = shape_row(shape) | row | {"us": f"{took[name]:.2f}"}
                write(row)
                print(*row.values(), sep=",", flush=True)
            calls.clear()
            lab.release()


if __name__ == "__main__":
    main()
