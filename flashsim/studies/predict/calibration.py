"""The constants of the time model, fitted by `benchmarks/predict.py --fit`.

The constants of the Hopper kernels were fitted to times on one H100, of the shapes `CALIBRATION` in
`benchmarks/time_shapes.py` and of random shapes, and to times on one H200 of kernels that have not
changed since. The constants of the other kernels were fitted to times on one H200. All constants
are tested on shapes that the fit does not use (docs/reference/predictions.md). The rates of a
chip's units were measured with other kernels (docs/data/units-h200.csv).
"""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import NamedTuple

from flashsim.errors import own_errors


@own_errors
class Constants(NamedTuple):
    """The fitted constants from which the time of one stage of a kernel family is predicted.

    A "share" is a fraction of the time that one hardware unit needs for a visit (one query tile
    times one key tile; see `units.Work`). Other blocks on the SM wait during this share of the
    time. A share is near 1 if the unit bounds the kernel's time. A share is near 0 if the unit
    works at the same time as other units. A share exceeds 1 if the kernel's warps wait for each
    other.

    Attributes
    ----------
    tensor : float
        Share of the tensor cores' time at the data sheet's peak.
    scores, masked : float
        Instructions per score on the CUDA cores, and additional ones in partly masked tiles.
    loads : float
        Additional instructions per score if a Hopper kernel for dK and dV loads the log-sum-exp and
        delta of rows. In bfloat16 up to head_dim 128, products add them instead.
    shared : float
        Share of shared memory's time.
    pieces : float
        Instructions that compute the address of a 16-byte piece, if each piece needs its own.
    reduced : float
        Share of the time that L2 would need to deliver as many bytes as are added at L2.
    own : float
        Share of L2's time for the bytes that an outer tile loads and stores outside its visits.
    waits : float
        Share of the tensor cores' time in which a block waits while other blocks on the same SM
        run.
    visit, item, launch : float
        Latencies in seconds: of a visit, of an outer tile, and of the kernel. `visit` and `waits`
        apply to two warpgroups that use the tensor cores alternately (ping-pong scheduling).
        The dQ kernel of Hopper's three passes is launched early, so its `launch` is another time:
        a block that waits for an SM begins so much later than the SM is free.
    changeover : float
        Seconds lost once if there are more outer tiles than run on the SMs at the same time.
    cluster, doubling : float
        Seconds by which a work tile takes longer if the blocks of a cluster share it: for any
        cluster, and for each doubling of its blocks (three times for a cluster of eight).
    throttle : float
        Relative slowdown of the chip once a kernel has run for `POWER_AFTER`.
    """

    tensor: float = 0.0
    scores: float = 0.0
    masked: float = 0.0
    loads: float = 0.0
    shared: float = 0.0
    pieces: float = 0.0
    reduced: float = 0.0
    own: float = 0.0
    waits: float = 0.0
    visit: float = 0.0
    item: float = 0.0
    launch: float = 2e-6
    changeover: float = 0.0
    cluster: float = 0.0
    doubling: float = 0.0
    throttle: float = 0.0


class DecodeConstants(NamedTuple):
    """The constants of the decode kernel, in seconds except for `rate`, `hbm_share` and `scatter`.

    Each call adds the time `launch`. Each thread block adds the time `item`, the time for its keys,
    and `row` per element of its results. An SM streams at most `rate` bytes per second; all SMs
    together stream at most `hbm_share` of HBM's nominal bandwidth. Merging the splits of the keys
    adds `merge`, or `exchange` if the splits form a cluster. With a paged cache, reading the first
    page numbers adds `table`, and each byte takes 1 + `scatter` / sqrt(bytes of a page's rows)
    times as long.
    """

    launch: float
    item: float
    row: float
    rate: float
    hbm_share: float
    merge: float
    exchange: float
    scatter: float
    table: float


#: Fitted by `benchmarks/predict.py --decode --fit` to an earlier run of docs/data/decode-h200.csv:
#: to its rows with batches of 1 and 32, and to two of its sweeps over splits.
DECODING = DecodeConstants(
    launch=9.05e-08,
    item=3.65e-06,
    row=6.86e-10,
    rate=6.59e10,
    hbm_share=0.907,
    merge=2.85e-06,
    exchange=5.56e-07,
    scatter=0.352,
    table=3.84e-07,
)


def _read() -> dict[str, dict[str, Constants]]:
    text = files("flashsim").joinpath("data", "time_model.csv").read_text(encoding="utf-8")
    found: dict[str, dict[str, Constants]] = {}
    for row in csv.DictReader(text.splitlines()):
        kernels, stage = row.pop("kernels"), row.pop("stage")
        constants = Constants(**{name: float(text) for name, text in row.items() if text})
        found.setdefault(kernels, {})[stage] = constants
    return found


#: Constants by kernel family and stage, from flashsim/data/time_model.csv. Hopper has a separate
#: kernel for each class of head_dim. A name ends in the largest head_dim of its class, 96 or 128; a
#: name without a number is for head_dim 64, "wide" is up to 192, and "widest" is for more. "roles"
#: is the fused kernel for up to 192 columns whose warpgroups have different roles. "deferred"
#: computes the dQ of a visit during the next visit. "once" has one visit per row tile. "fp8" has
#: the constants of the 16-bit forward kernel for all widths, from an earlier fit: no constant was
#: fitted to FP8 kernels.
CALIBRATED = _read()

#: Seconds for which the chip keeps its highest clock while it runs these kernels.
POWER_AFTER = 3e-3
#: Kernels that only stream: seconds for the launch and the share of the nominal HBM bandwidth, each
#: by whether a launch begins before the previous one ends (`Kernel.overlaps`), fitted in the same
#: way; and the least time of a launch that does not overlap.
STREAMED = {False: (2.22e-6, 0.844), True: (1.00e-6, 0.915)}
STREAMED_LEAST = 4e-6
#: A copy's share of the nominal HBM bandwidth, and the seconds of any launch.
HBM_SHARE, LAUNCH = 0.85, 3e-6
#: The share of L2 whose data is certainly still in L2 when it is read again (docs/notebooks/l2.md,
#: the probe).
L2_KEEPS = 2 / 3
#: The bytes of a kernel, divided by L2's size, from which on L2 keeps nothing of the previous
#: kernel or call. Of 1, 1.25, 1.5 and 2, it fits an H100 best.
#: `FORWARD_L2_FULL` is for Hopper's forward, fitted with its other constants.
L2_FULL, FORWARD_L2_FULL = 1.0, 0.85
#: If the blocks of a head group work on different query heads: the share of the requests for data
#: beyond L2 that HBM serves in Hopper's kernels. Of 0.3, 0.5, 0.7 and 1, chosen by looking at the
#: times of the twelve random shapes whose blocks do so (docs/notebooks/times.md).
DRIFTED = 0.5
#: The exponent p that combines the time t of tiles and the time h of HBM's bytes: the result is
#: (t^p + h^p)^(1/p). With p = 1 they would not overlap; with p = infinity they would overlap
#: completely. `AGAIN` is for kernels that read bytes from HBM again, chosen by looking at six
#: passes with grouped heads, and for Hopper's backward kernels. `WIDE` is for Hopper's fused
#: kernels above a head_dim of 128, whose tiles leave less shared memory for loads ahead: of 1.5, 2,
#: 2.5 and 3, it fits an H100 and an H200 best. `FORWARD` is for Hopper's forward.
AGAIN, WIDE, FORWARD = 3, 2, 6
#: The share of HBM's time for one wave's first tiles and results that overlaps with no product in
#: Hopper's fused and single-KV-tile backwards. In the forward it is 1: its blocks begin and end
#: together. Of 0, 0.5 and 1, this share fits best.
EXPOSED = 0.5
#: Seconds by which an outer tile of Hopper's forward takes longer if each warpgroup computes only
#: its own visits (`FS_SHARES`), whose numbers it reads from the schedule's tables. Chosen from
#: 0.2, 0.3, 0.4 and 0.5 µs with 718 forwards on an H100 (docs/notebooks/times.md).
SHARES = 0.4e-6
#: Seconds by which a visit of "flash2-fused-first" takes longer, because it reads the flag of its
#: row tile; and seconds by which a visit that may be the first of its row tile takes longer: it
#: stores dQ and sets the flag, or waits for a block that does. Fitted by `benchmarks/predict.py
#: --fit` to the passes of an H100 and an H200.
FIRST = 0.10e-6, 0.35e-6
#: The share of the tensor cores' peak that a library's large matrix product reaches: 783 of 989
#: TFLOP/s in bfloat16, for 8192 x 8192 x 8192, on the same H200.
MATRIX_SHARE = 0.79
