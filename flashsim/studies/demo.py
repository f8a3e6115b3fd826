"""Demonstration: run a real model's attention, check it against the model, compare algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashsim import report
from flashsim.api.compare import Comparison, compare
from flashsim.api.samples import SAMPLES, load_sample
from flashsim.counts.questions import in_words
from flashsim.errors import own_errors
from flashsim.report import Table
from flashsim.schedule.dataflow import ALGORITHMS
from flashsim.schedule.tiling import Tiling

#: Largest difference from the model's output that counts as agreement. The bundled q, k and v, and
#: our output, are rounded to float16, the model's are not: values around 3 differ by 1e-3 and more.
LIMIT = 5e-3
#: One tiling for all, so that what differs is the algorithm: 8 x 8 tiles of the 512 x 512 scores.
TILING = Tiling(64, 64)


@dataclass(frozen=True, eq=False)
class DemoLayer:
    """One layer's result.

    Attributes
    ----------
    name : str
    comparison : Comparison
        Standard attention, FlashAttention-1 and FlashAttention-2, forward and backward.
    differences : dict of float
        Largest difference of each algorithm's output from the model's own.
    files : list of Path
        The traces written, forward and backward, of FlashAttention-2.
    """

    name: str
    comparison: Comparison
    differences: dict[str, float]
    files: list[Path]

    __repr__ = report.short
    _repr_html_ = report.card

    @property
    def passed(self) -> bool:
        """Whether the output of `run`'s default, FlashAttention-2, equals the model's."""
        return self.differences["flash2"] < LIMIT

    def bytes_moved(self) -> Table:
        """A table of the bytes that each algorithm moved between HBM and the chip."""
        traces = self.comparison.traces
        first = traces[0]
        table = Table(
            f"Attention of a real sentence encoder ({self.name}): {in_words(first.problem)}, tiles "
            f"{first.tiling}, on a simulated {first.device.name}",
            (
                "algorithm",
                "direction",
                "loaded B",
                "stored B",
                "moved B",
                "times fewer than standard",
            ),
            note=(
                "moved: bytes between HBM, the GPU's large memory, and the chip. On the chip each "
                f"block of threads holds at most {max(t.peak_sram() for t in traces):,} B of "
                f"{first.device.sram_bytes:,} B. No algorithm can move fewer than "
                f"{first.compulsory():,} B forward: each input once, each output once. The output "
                "of FlashAttention-2 differs from the real model's by at most "
                f"{self.differences['flash2']:.2g}; rounding to float16 explains up to {LIMIT:g}."
            ),
        )
        standard = {t.direction: t.bytes() for t in traces if t.algorithm == "standard"}
        for t in traces:
            fewer = round(standard[t.direction] / t.bytes(), 2)
            stored = t.bytes("store") + t.bytes("reduce")
            table.rows.append(
                (
                    ALGORITHMS[t.algorithm].title,
                    t.direction,
                    *(t.bytes("load"), stored, t.bytes()),
                    fewer,
                )
            )
        return table

    def agreement(self) -> Table:
        """A table of each algorithm's output error against the model's output."""
        table = Table(
            f"{self.name}: output against the model's own",
            ("algorithm", "largest difference", f"below {LIMIT:g}"),
            note="standard attention rounds the scores themselves to float16 on their way to HBM",
        )
        for algorithm, difference in self.differences.items():
            table.rows.append((algorithm, difference, difference < LIMIT))
        return table


@own_errors
def in_a_sentence(layers: Sequence[DemoLayer]) -> str:
    """The result of the demonstration, for someone who reads nothing else."""
    moved = {
        t.algorithm: t.bytes() for t in layers[0].comparison.traces if t.direction == "forward"
    }
    fewer = moved["standard"] / moved["flash2"]
    return (
        f"FlashAttention-2 asks memory for {fewer:.1f} times fewer bytes than standard attention; "
        "the answer is the same."
    )


@own_errors
def demo(out: Path) -> list[DemoLayer]:
    """Run every bundled layer and write the traces of FlashAttention-2 into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    return [_layer(name, out) for name in SAMPLES]


def _layer(name: str, out: Path) -> DemoLayer:
    q, k, v, expected = load_sample(name)
    comparison = compare(
        q, k, v, dout=expected.astype(v.dtype), tiling=TILING, backward_tiling=TILING
    )
    differences = {
        algorithm: float(np.abs(result.out.astype(np.float64) - expected).max())
        for algorithm, result in comparison.results.items()
    }
    files = []
    for trace in comparison.traces:
        if trace.algorithm == "flash2":
            files.append(out / f"{name}-flash2-{trace.direction}.npz")
            trace.save(files[-1])
    return DemoLayer(name, comparison, differences, files)
