"""Measure decoding on a GPU: µs and TB/s, beside cuDNN and FlashAttention-2 (through torch).

    python benchmarks/decode.py [--quick] [--csv decode.csv] [--plot decode.png]
    python benchmarks/decode.py --read decode.csv --plot decode.png
    python benchmarks/decode.py --latent --csv latent.csv    # latent attention (MLA), below

Inputs are bfloat16, 32 query heads on 8 KV heads, random values, no mask (with n_q = 4, torch's
causal mask is not aligned to the end of the cache). At each shape all implementations are
interleaved after a spinning kernel that hides the host's time (`gpu_lab.medians`). One of them is a
copy of 1 GiB: the bytes that it reads and writes per second are the bandwidth. TB/s are the bytes
of K and V divided by the time. Caches that fit in L2 stay there between calls. Pages are in random
order.

The sweep comes first. It times one shape with fixed numbers of splits, beside the number that
flashsim chooses; 2, 4 and 8 splits merge in clusters on Hopper. Rows are written as they are
measured.

Latent attention has 128 query heads on one latent of 576 columns, of which 512 are V, contiguous
and in pages. FLOPs are those of both products, 2 x 128 x (576 + 512) per query and key; bytes are
the cache's, once. `difference` is the largest difference from float32 attention by torch, over the
first two sequences.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gpu_lab import TorchLab, csv_file, medians, read_table

HEADS, KV_HEADS, DTYPE, SIZE = 32, 8, "bfloat16", 2
MOST_BYTES = 18e9  # of K and V
COPY_BYTES = 1 << 30
PAGES = (1, 16, 64)
SPLITS = (1, 2, 4, 8, 12, 16, 24, 32, 64)
CALLS = 5
OURS, COPY = "flashsim", "copy"
AUTO, BESIDE = f"{OURS}, splits=auto", "cuDNN, splits="  # in the sweep
RIVALS = {"cuDNN": "CUDNN_ATTENTION", "FlashAttention-2": "FLASH_ATTENTION"}
COLUMNS = (
    *("gpu", "head_dim", "n_q", "batch", "keys", "cache_MB", "implementation", "splits"),
    *("us", "tb_per_s", "copy_tb_per_s", "of_copy", "of_best_rival", "difference"),
)


@dataclass(frozen=True)
class Shape:
    """One shape of the table."""

    head_dim: int
    n_q: int
    batch: int
    keys: int

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of K and V."""
        return 2 * self.batch * self.keys * KV_HEADS * self.head_dim * SIZE


def shapes() -> list[Shape]:
    """Return the table's shapes: those whose cache has at most `MOST_BYTES`."""
    every = [  # the shapes with the tightest targets first, in case time runs out
        Shape(d, n_q, batch, keys)
        for n_q in (1, 4)
        for batch in (8, 1, 32, 128)
        for keys in (32768, 4096, 131072, 1024)
        for d in (64, 128)
    ]
    return [s for s in every if s.cache_bytes <= MOST_BYTES]


QUICK = [Shape(128, 1, 8, 32768), Shape(128, 4, 1, 32768), Shape(64, 1, 32, 4096)]
SWEPT = [
    Shape(d, 1, b, n)
    for d in (128, 64)
    for b, n in ((1, 1024), (8, 1024), (1, 4096), (8, 4096), (8, 32768), (1, 131072))
] + [Shape(128, 1, 32, 4096)]


class Bench(TorchLab):
    """Arrays on the GPU, and the implementations that are timed."""

    def __init__(self, repetitions: int, most: int) -> None:
        super().__init__()
        self.repetitions = repetitions
        self._cache = [self._random(most // 2 // SIZE) for _ in range(2)]
        make = self.torch.empty
        self._copied = [make(COPY_BYTES, dtype=self.torch.uint8, device="cuda") for _ in range(2)]

    def _random(self, n: int) -> Any:
        bf16 = getattr(self.torch, DTYPE)
        return self.torch.empty(n, dtype=bf16, device="cuda").normal_()

    def contenders(self, s: Shape) -> dict[str, Callable[[], Any]]:
        """Return the implementations of a shape, by name."""
        q = self._random(s.batch * HEADS * s.n_q * s.head_dim)
        q = q.view(s.batch, HEADS, s.n_q, s.head_dim)
        used = s.cache_bytes // 2 // SIZE
        k, v = (x[:used].view(s.batch, KV_HEADS, s.keys, s.head_dim) for x in self._cache)
        made: dict[str, Callable[[], Any]] = {COPY: self._copy, OURS: _ours(q, k, v)}
        for name, backend in RIVALS.items():
            made[name] = self._rival(backend, q, k, v)
        if s.n_q > 1:
            return made
        for page in PAGES:
            pools = (x.view(-1, KV_HEADS, page, s.head_dim) for x in (k, v))
            order = self.torch.randperm(s.batch * s.keys // page, device="cuda").int()
            table = order.view(s.batch, -1)
            made[f"{OURS}, pages of {page}"] = _ours(q, *pools, block_table=table)
        return made

    def sweep(self, s: Shape) -> dict[str, Callable[[], Any]]:
        """Return flashsim's decoding with automatic and with fixed splits, of at least 256 keys."""
        q = self._random(s.batch * HEADS * s.n_q * s.head_dim)
        q = q.view(s.batch, HEADS, s.n_q, s.head_dim)
        used = s.cache_bytes // 2 // SIZE
        k, v = (x[:used].view(s.batch, KV_HEADS, s.keys, s.head_dim) for x in self._cache)
        fixed = {
            f"{OURS}, splits={n}": _ours(q, k, v, splits=n) for n in SPLITS if 256 * n <= s.keys
        }
        rival = {BESIDE: self._rival(RIVALS["cuDNN"], q, k, v)}
        return {COPY: self._copy, AUTO: _ours(q, k, v), **rival, **fixed}

    def _copy(self) -> None:
        self._copied[1].copy_(self._copied[0])

    def _rival(self, backend: str, q: Any, k: Any, v: Any) -> Callable[[], Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def attend() -> Any:
            with sdpa_kernel(getattr(SDPBackend, backend)), self.torch.no_grad():
                return scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return attend

    def times(self, works: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Return the median µs by name; an implementation that fails is left out and reported."""
        able = {}
        for name, work in works.items():
            try:
                for _ in range(2):
                    work()
                self.torch.cuda.synchronize()
                able[name] = work
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
                if name == OURS or "refused the launch" in str(error):
                    raise  # after this failure no result can be trusted
        return medians(self, able, self.repetitions, CALLS)

    def rows(self, s: Shape, works: dict[str, Callable[[], Any]]) -> list[dict[str, Any]]:
        """Return the table's rows of a shape."""
        times = self.times(works)
        copy = 2 * COPY_BYTES / times.pop(COPY) / 1e6
        rivals = [times[name] for name in (*RIVALS, BESIDE) if name in times]
        rows = []
        for name, us in times.items():
            speed = s.cache_bytes / us / 1e6
            row = {
                **{"gpu": self.name, "head_dim": s.head_dim, "n_q": s.n_q, "batch": s.batch},
                **{"keys": s.keys, "cache_MB": s.cache_bytes / 1e6, "implementation": name},
                **{"splits": chosen(s, name), "us": us, "tb_per_s": speed},
                **{"copy_tb_per_s": copy, "of_copy": speed / copy},
                "of_best_rival": min(rivals) / us if rivals else "",
                "difference": "",
            }
            rows.append(row)
        theirs = next((works[name]() for name in ("cuDNN", BESIDE) if name in times), None)
        for row in rows:
            name = row["implementation"]
            if theirs is not None and name.startswith(OURS) and "pages" not in name:
                row["difference"] = float((works[name]().out - theirs).abs().max())
        return rows


def _ours(q: Any, k: Any, v: Any, **more: Any) -> Callable[[], Any]:
    import flashsim
    from flashsim.backends.cupy_gpu.decode import Workspace

    workspace = Workspace()
    given = {"algorithm": "flash-decode", "backend": "cupy", "workspace": workspace, **more}
    return lambda: flashsim.run(q, k, v, **given)


def chosen(s: Shape, name: str) -> int | str:
    """Return the number of splits per sequence that flashsim uses; "" for other implementations."""
    if not name.startswith(OURS):
        return ""
    fixed = name.partition("splits=")[2]
    sizes = s.n_q, s.keys, s.head_dim
    fixed_to = int(fixed) if fixed.isdigit() else None
    return splits_of(*sizes, splits=fixed_to, batch=s.batch, heads=HEADS, kv_heads=KV_HEADS)


def splits_of(*sizes: int, splits: int | None = None, batch: int, **problem: Any) -> int:
    """Return the number of splits per sequence that the kernel's heuristics choose on this GPU."""
    from flashsim import Problem
    from flashsim.backends.cupy_gpu.engine import gpu_of
    from flashsim.backends.launch_policy import decode_plan

    p = Problem(*sizes, batch=batch, dtype=DTYPE, **{"kv_heads": 1, **problem})
    return decode_plan.plan(p, (sizes[1],) * batch, gpu_of(0), splits).splits[0]


class Latent(Bench):
    """Latent attention: arrays on the GPU, and the implementations that are timed."""

    HEADS, WIDTH, VALUES, SCALE = 128, 576, 512, 192**-0.5
    SHAPES = ((64, 4096), (8, 32768), (128, 4096), (1, 131072), (32, 1024))
    PAGES = (0, 1, 16, 64)
    COLUMNS = (
        *("gpu", "n_q", "batch", "keys", "cache_MB", "page", "splits", "us", "tflop_per_s"),
        *("tb_per_s", "difference"),
    )

    def __init__(self, repetitions: int) -> None:
        most = max(batch * keys for batch, keys in self.SHAPES) * self.WIDTH
        super().__init__(repetitions, 4 * most)

    def measured(self, n_q: int, batch: int, keys: int) -> list[dict[str, Any]]:
        """Return the table's rows of a shape."""
        q = self._random(batch * self.HEADS * n_q * self.WIDTH)
        q = q.view(batch, self.HEADS, n_q, self.WIDTH)
        k = self._cache[0][: batch * keys * self.WIDTH].view(batch, 1, keys, self.WIDTH)
        works = {str(page): self._work(q, k, page) for page in self.PAGES}
        rows = []
        for page, us in self.times(works).items():
            flops = 2 * batch * keys * n_q * self.HEADS * (self.WIDTH + self.VALUES)
            cache = batch * keys * self.WIDTH * 2
            rows.append(
                {
                    **{"gpu": self.name, "n_q": n_q, "batch": batch, "keys": keys, "page": page},
                    **{"cache_MB": cache / 1e6, "us": us, "tflop_per_s": flops / us / 1e6},
                    **{"tb_per_s": cache / us / 1e6, "splits": self._splits(n_q, batch, keys)},
                    "difference": self._off(q, k, works["0"]) if page == "0" else "",
                }
            )
        return rows

    def _work(self, q: Any, k: Any, page: int) -> Callable[[], Any]:
        more: dict[str, Any] = {"head_dim_v": self.VALUES, "scale": self.SCALE}
        if page:
            batch, keys = k.shape[0], k.shape[2]
            k = k.view(-1, 1, page, self.WIDTH)
            order = self.torch.randperm(batch * keys // page, device="cuda").int()
            more["block_table"] = order.view(batch, -1)
        return _ours(q, k, None, **more)

    def _off(self, q: Any, k: Any, work: Callable[[], Any]) -> float:
        few, latent = q[:2].float(), k[:2, 0].float()
        scores = self.torch.einsum("bhqd,bnd->bhqn", few, latent) * self.SCALE
        values = latent[..., : self.VALUES]
        truth = self.torch.einsum("bhqn,bnd->bhqd", scores.softmax(-1), values)
        return float((work().out[:2] - truth).abs().max())

    def _splits(self, n_q: int, batch: int, keys: int) -> int:
        sizes = n_q, keys, self.WIDTH, self.VALUES
        return splits_of(*sizes, batch=batch, heads=self.HEADS, latent=True, scale=self.SCALE)


def latent(options: argparse.Namespace) -> None:
    """Measure latent attention, print its rows and write them."""
    bench = Latent(options.repetitions)
    with csv_file(options.csv or "latent.csv", bench.COLUMNS) as write:
        for n_q in (1, 2):
            for batch, keys in bench.SHAPES:
                for r in bench.measured(n_q, batch, keys):
                    write(r)
                    where = f"{batch} x {keys}, n_q {n_q}, pages of {r['page']}"
                    speed = f"{r['tflop_per_s']:6.1f} TFLOP/s {r['tb_per_s']:5.2f} TB/s"
                    off = f"  differs by {r['difference']:.1e}" if r["difference"] != "" else ""
                    print(f"{where:36} {r['splits']:>3} {r['us']:8.1f} us {speed}{off}", flush=True)


def show(rows: Iterable[dict[str, Any]]) -> None:
    """Print one line per row."""
    for r in rows:
        rival = f"{r['of_best_rival']:5.2f} x best" if r["of_best_rival"] != "" else ""
        off = f"  differs by {r['difference']:.1e}" if r["difference"] != "" else ""
        print(
            f"  {r['implementation']:24} {r['splits']!s:>3} {r['us']:9.1f} us "
            f"{r['tb_per_s']:6.3f} TB/s {r['of_copy']:5.2f} of copy  {rival}{off}",
            flush=True,
        )


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Return which rows miss their targets.

    The targets are the fastest other implementation's time; 0.93 of the copy bandwidth from 256 MB
    on; pages of 16 within 10 % of contiguous keys; automatic splits within 3 % of the fastest.
    """
    found, at = [], lambda r: f"{r['batch']} x {r['keys']} d{r['head_dim']} n_q {r['n_q']}"
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for r in rows:
        cells.setdefault(at(r), {})[r["implementation"]] = r
    for where, cell in cells.items():
        ours = cell.get(OURS, cell.get(AUTO))
        if ours is None:
            continue  # the measurement was cut short
        if ours["of_best_rival"] != "" and float(ours["of_best_rival"]) < 1:
            found.append(f"{where}: {float(ours['of_best_rival']):.3f} x the best rival")
        if float(ours["cache_MB"]) > 256 and float(ours["of_copy"]) < 0.93:
            found.append(f"{where}: {float(ours['of_copy']):.3f} of the copy bandwidth")
        paged = cell.get(f"{OURS}, pages of 16")
        if paged and float(paged["us"]) > 1.1 * float(ours["us"]):
            found.append(f"{where}: pages of 16 {float(paged['us']) / float(ours['us']):.2f} x")
        swept = {n: float(r["us"]) for n, r in cell.items() if "splits=" in n and n != BESIDE}
        if swept and swept[AUTO] > 1.03 * min(swept.values()):
            best = min(swept, key=lambda n: swept[n])
            found.append(f"{where}: {swept[AUTO] / swept[best]:.3f} x the time of {best}")
    return found


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Plot TB/s over the cache's size, with a panel per head_dim and n_q; pages are dashed lines.

    For shapes with caches of the same size, the median is drawn.
    """
    import matplotlib as mpl
    from line_labels import end_labels
    from matplotlib.figure import Figure

    from flashsim.viz import palette
    from flashsim.viz.style import MARKERS, rc

    look = palette.theme("light")
    drawn = [r for r in rows if "splits=" not in r["implementation"]]
    panels = sorted({(int(r["n_q"]), int(r["head_dim"])) for r in drawn})
    names = list(dict.fromkeys(r["implementation"] for r in drawn))
    ours = names[0]
    order = [ours, *(n for n in names if n != ours and "pages" not in n)]
    paged = [n for n in names if "pages" in n][-1:]  # only the largest page size
    with mpl.rc_context(rc(look)):
        figure = Figure(figsize=(9.6, 8), layout="constrained", dpi=120)
        axes = figure.subplots(-(-len(panels) // 2), 2, sharey=True, sharex=True, squeeze=False)
        best = 0.0
        for ax, (n_q, d) in zip(axes.flat, panels, strict=False):
            here = [r for r in drawn if (int(r["head_dim"]), int(r["n_q"])) == (d, n_q)]
            ends = []
            for number, name in enumerate([*order, *paged]):
                found: dict[float, list[float]] = {}
                for r in here:
                    if r["implementation"] == name:
                        found.setdefault(float(r["cache_MB"]), []).append(float(r["tb_per_s"]))
                if not found:
                    continue
                xs = sorted(found)
                ys = [statistics.median(found[x]) for x in xs]
                best = max(best, *(ys if name == ours else [0.0]))
                color = look.cycle[(2, 1, 4, 3)[number % 4]]
                ax.plot(
                    xs, ys, color=color, marker=MARKERS[number], ms=5,
                    lw=1.8 if number else 2.6, ls="--" if "pages" in name else "-",
                    zorder=4 - number / 9,
                )  # fmt: skip
                ends.append((xs[-1], ys[-1], name.replace("flashsim, ", ""), color))
            copy = statistics.median(float(r["copy_tb_per_s"]) for r in here)
            ax.axhline(copy, color=look.muted, lw=1, zorder=1)
            ax.annotate(
                "a copy kernel", (0.01, copy), (0, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="bottom", fontsize=10.5, color=look.muted,
            )  # fmt: skip
            some = "1 query" if n_q == 1 else f"{n_q} queries"
            ax.set(xscale="log", ylim=(0, best * 1.12))
            ax.set_title(f"{some} per head, d = {d}", fontsize=13, fontweight="normal")
            ax.set_xlim(right=20 * max(float(r["cache_MB"]) for r in drawn))  # space for the labels
            ax.grid(axis="y")
            ax.ends = ends
        for ax in axes[-1]:
            ax.set_xlabel("size of K and V (MB)")
        for ax in axes[:, 0]:
            ax.set_ylabel("K and V read (TB/s)")
        figure.suptitle(
            f"Decoding on {rows[0]['gpu']}: flashsim reads up to {best:.1f} TB/s, as a copy does",
            fontsize=15, fontweight="bold", x=0.02, ha="left",
        )  # fmt: skip
        figure.canvas.draw()
        for ax in axes.flat[: len(panels)]:
            end_labels(ax, ax.ends, size=10.5)
        figure.savefig(path)


def measure(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one shape after the other: first the sweep, then the table."""
    wanted = QUICK if options.quick else shapes()
    swept = [] if options.quick else SWEPT
    most = max(s.cache_bytes for s in [*wanted, *swept])
    bench = Bench(3 if options.quick else options.repetitions, most)
    for s in swept:
        print(f"splits at {s.batch} x {s.keys}, d {s.head_dim}, n_q {s.n_q}")
        yield bench.rows(s, bench.sweep(s))
    for s in wanted:
        print(f"{s.batch} x {s.keys}, d {s.head_dim}, n_q {s.n_q}: {s.cache_bytes / 1e6:.0f} MB")
        yield bench.rows(s, bench.contenders(s))


def main() -> None:
    """Measure or read the table, print and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three shapes, no sweep")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--latent", action="store_true", help="measure latent attention instead")
    parser.add_argument("--csv", help="file for the table; default: decode.csv or latent.csv")
    parser.add_argument("--read", metavar="CSV", help="read this table instead of measuring")
    parser.add_argument("--plot", metavar="FILE", help="plot the table to this file")
    options = parser.parse_args()
    if options.latent:
        latent(options)
        return
    rows: list[dict[str, Any]] = []
    if options.read:
        rows += read_table(options.read)
    else:
        with csv_file(options.csv or "decode.csv", COLUMNS) as write:
            for some in measure(options):
                show(some)
                write(*some)
                rows += some
    short = verdict(rows)
    print(
        "\n".join(
            ["Short of the aims:", *(f"  {x}" for x in short)] if short else ["All aims met."]
        )
    )
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
