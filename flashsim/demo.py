"""The demonstration: a real model's attention, executed, checked against the model, compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashsim.compare import Comparison, compare
from flashsim.samples import SAMPLES, load_sample

#: Largest difference from the model's output that counts as agreement. The bundled q, k and v are
#: rounded to float16, so is our output, and the model's is not: values near 1 differ by 1e-3.
LIMIT = 5e-3


@dataclass(frozen=True, eq=False)
class DemoLayer:
    """One layer's result.

    Attributes
    ----------
    name : str
    comparison : Comparison
        Standard attention, FlashAttention-1 and FlashAttention-2, forward and backward.
    difference : float
        Largest difference of any algorithm's output from the model's own.
    files : list of Path
        The traces written, forward and backward, of FlashAttention-2.
    """

    name: str
    comparison: Comparison
    difference: float
    files: list[Path]

    @property
    def passed(self) -> bool:
        """Whether the output is the model's."""
        return self.difference < LIMIT


def demo(out: Path) -> list[DemoLayer]:
    """Run every bundled layer and write the traces of FlashAttention-2 into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    return [_layer(name, out) for name in SAMPLES]


def _layer(name: str, out: Path) -> DemoLayer:
    q, k, v, expected = load_sample(name)
    comparison = compare(q, k, v, dout=np.ones_like(expected, dtype=v.dtype))
    difference = max(
        float(np.abs(result.out.astype(np.float64) - expected).max())
        for result in comparison.results.values()
    )
    files = []
    for trace in comparison.traces:
        if trace.algorithm == "flash2":
            files.append(out / f"{name}-flash2-{trace.direction}.npz")
            trace.save(files[-1])
    return DemoLayer(name, comparison, difference, files)
