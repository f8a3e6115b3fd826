"""Recomputes numbers of papers and write-ups: the published value, ours, and why they differ.

>>> from flashsim import reproduce
>>> for table in reproduce.tables("ring"):
...     print(table)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable

from flashsim.errors import own_errors
from flashsim.problem import checks
from flashsim.report import Table
from flashsim.studies.reproduce import distribution, memory_traffic, numerics, pallas, smem_tiles

#: The sets of numbers that can be recomputed: name -> (title, function).
NAMES: dict[str, tuple[str, Callable[[], list[Table]]]] = {
    "hbm": ("FlashAttention, figure 2: HBM accesses and FLOPs", memory_traffic.hbm),
    "memory": ("FlashAttention, table 21: memory footprint", memory_traffic.memory),
    "bounds": ("FlashAttention, theorem 2; lower bounds of Saha and Ye", memory_traffic.bounds),
    "order": ("KV-outer loops move more bytes than Q-outer loops", memory_traffic.order),
    "softmax": ("online softmax: accesses per element (Milakov, Gimelshein)", numerics.softmax),
    "error": ("FlashAttention-3, table 3: numerical error", numerics.error),
    "fp8": ("FlashAttention-3, table 3, with FP8; flushing the accumulator", numerics.fp8),
    "tiles": ("FlashAttention-2 and -3: shared memory of their tiles", smem_tiles.tiles),
    "decoding": ("flash-decoding: the share of a GPU that is used", distribution.decoding),
    "ring": ("ring attention, table 2: communication hidden by arithmetic", distribution.ring),
    "pallas": ("attention in Pallas: intensities, times, on-chip bytes", pallas.pallas),
    "sawtooth": ("sawtooth wavefronts: fewer L2 misses", memory_traffic.sawtooth),
}

#: Published numbers that cannot be derived from the algorithm alone, and why.
NOT_DERIVABLE = (
    ("run times and TFLOP/s", "they depend on clocks, latencies and the overlap of units"),
    (
        "FlashAttention's 40.3 GB for standard attention",
        "it includes all passes of a PyTorch program (mask, dropout, casts), which the paper does "
        "not list; `hbm` computes how many passes over N x N scores these are",
    ),
    (
        "HBM accesses over block size, figure 2 (middle)",
        "it is printed as a curve without numbers; `hbm` has ours at the same block sizes",
    ),
    (
        "the shape for which FlashAttention-3's errors were measured",
        "table 3 does not state it, and errors grow with N; `fp8` agrees at N = 8,192 and d = 128. "
        "Table 3 does not name the library of its baselines either",
    ),
    ("speed-ups of flash-decoding", "they are run times; `decoding` has the blocks in flight"),
    ("perplexities, training times", "they depend on models and on whole training programs"),
)


@own_errors
def tables(name: str) -> list[Table]:
    """Return tables that recompute one set of published numbers.

    Raises
    ------
    OptionError
        If no set has that name; the message lists all names.
    """
    return NAMES[checks.one_of("set of published numbers", name, NAMES)][1]()


@own_errors
def listing() -> list[Table]:
    """Return two tables: what can be recomputed, and what cannot be recomputed and why."""
    known = [(name, what) for name, (what, _) in NAMES.items()]
    rest = "What cannot be derived from the algorithm alone"
    return [
        Table("What can be recomputed", ("name", "what"), [*known]),
        Table(rest, ("published", "why"), [*NOT_DERIVABLE]),
    ]


__all__ = ["NAMES", "NOT_DERIVABLE", "listing", "tables"]
