"""A demonstration: runs attention on the inputs of a real model, and compares algorithms."""

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

#: The largest difference from the model's output that counts as agreement. The bundled q, k and v,
#: and flashsim's output, are rounded to float16, but the model's are not. So values of about 3
#: differ by 1e-3 and more.
LIMIT = 5e-3
#: One tiling for all algorithms, for a fair comparison: 8 x 8 tiles of the 512 x 512 scores.
TILING = Tiling(64, 64)


@dataclass(frozen=True, eq=False)
class DemoLayer:
    """The result of the demonstration for one layer of the model.

    Attributes
    ----------
    comparison : Comparison
        The costs of the forward and backward passes of standard attention, FlashAttention-1 and
        FlashAttention-2.
    differences : dict of float
        Largest difference of each algorithm's output from the model's output.
    files : list of Path
        The trace files of FlashAttention-2, forward and backward.
    """

    name: str
    comparison: Comparison
    differences: dict[str, float]
    files: list[Path]

    __repr__ = report.short
    _repr_html_ = report.card

    @property
    def passed(self) -> bool:
        """Whether the output of `flash2` (the default of `run`) agrees with the model's output."""
        return self.differences["flash2"] < LIMIT

    def bytes_moved(self) -> Table:
        """Return a table of the bytes that each algorithm moved between HBM and SRAM."""
        traces = self.comparison.traces
        first = traces[0]
        table = Table(
            f"Attention of a real sentence encoder ({self.name}): {in_words(first.problem)}, tiles "
            f"{first.tiling}, on a simulated {first.device.name}",
            (
                *("algorithm", "direction", "loaded B", "stored B", "moved B"),
                "times fewer than standard",
            ),
            note=(
                "moved: bytes between HBM, the GPU's large memory, and the chip. Each thread block "
                f"uses at most {max(t.peak_sram() for t in traces):,} B of its "
                f"{first.device.sram_bytes:,} B on chip. No algorithm can move fewer than "
                f"{first.compulsory():,} B in the forward pass: each input once, each output once. "
                "The output of FlashAttention-2 differs from the real model's by at most "
                f"{self.differences['flash2']:.2g}; rounding to float16 explains up to {LIMIT:g}."
            ),
        )
        standard = {t.direction: t.bytes() for t in traces if t.algorithm == "standard"}
        for t in traces:
            name, fewer = ALGORITHMS[t.algorithm].title, standard[t.direction] / t.bytes()
            moved = t.bytes("load"), t.bytes("store") + t.bytes("reduce"), t.bytes()
            table.add(name, t.direction, *moved, round(fewer, 2))
        return table

    def agreement(self) -> Table:
        """Return a table of each algorithm's largest difference from the model's output."""
        table = Table(
            f"{self.name}: difference from the model's output",
            ("algorithm", "largest difference", f"below {LIMIT:g}"),
            note="standard attention differs more, because it stores the scores in HBM as float16",
        )
        for algorithm, difference in self.differences.items():
            table.add(algorithm, difference, difference < LIMIT)
        return table


@own_errors
def in_a_sentence(layers: Sequence[DemoLayer]) -> str:
    """Return a sentence that sums up the demonstration's results for these layers."""
    moved = {
        t.algorithm: t.bytes() for t in layers[0].comparison.traces if t.direction == "forward"
    }
    fewer = moved["standard"] / moved["flash2"]
    return (
        f"FlashAttention-2 moves {fewer:.1f} times fewer bytes between HBM and the chip than "
        "standard attention; the output is the same."
    )


@own_errors
def demo(out: Path) -> list[DemoLayer]:
    """Run attention for every bundled model layer, compare algorithms, and save traces in `out`."""
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
