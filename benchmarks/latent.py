"""Latent attention (MLA) decoded on a Hopper GPU: microseconds, TFLOP/s and TB/s.

    python benchmarks/latent.py [--csv latent.csv] [--repetitions 7]

128 query heads on one latent of 576 columns, of which 512 are V; bfloat16, random values, no mask.
Contiguous, and in pages that lie in random order, by turns behind a spinning kernel; medians. FLOPs
are of both products, 2 x 128 x (576 + 512) for each query and key; bytes are the cache's, once.
`difference` is the largest one to float32 attention by torch, of the first two sequences.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decode import Bench

HEADS, WIDTH, VALUES, SCALE = 128, 576, 512, 192**-0.5
SHAPES = [(64, 4096), (8, 32768), (128, 4096), (1, 131072), (32, 1024)]
PAGES = (0, 1, 16, 64)
COLUMNS = (
    *("gpu", "n_q", "batch", "keys", "cache_MB", "page", "splits", "us", "tflop_per_s"),
    *("tb_per_s", "difference"),
)


class Latent(Bench):
    """Arrays on the GPU, and what is timed there; of `Bench` how it times."""

    def __init__(self, repetitions: int) -> None:
        most = max(batch * keys for batch, keys in SHAPES) * WIDTH
        super().__init__(repetitions, 4 * most)

    def measured(self, n_q: int, batch: int, keys: int) -> list[dict[str, Any]]:
        """The rows of a shape."""
        q = self._random(batch * HEADS * n_q * WIDTH).view(batch, HEADS, n_q, WIDTH)
        k = self._cache[0][: batch * keys * WIDTH].view(batch, 1, keys, WIDTH)
        works = {str(page): self._work(q, k, page) for page in PAGES}
        times, rows = self.times(works), []
        for page, us in times.items():
            flops = 2 * batch * keys * n_q * HEADS * (WIDTH + VALUES)
            cache = batch * keys * WIDTH * 2
            rows.append(
                {
                    **{"gpu": self.name, "n_q": n_q, "batch": batch, "keys": keys, "page": page},
                    **{"cache_MB": cache / 1e6, "us": us, "tflop_per_s": flops / us / 1e6},
                    **{"tb_per_s": cache / us / 1e6, "splits": _splits(n_q, batch, keys)},
                    "difference": self._off(q, k, works["0"]) if page == "0" else "",
                }
            )
        return rows

    def _work(self, q: Any, k: Any, page: int) -> Callable[[], Any]:
        import flashsim
        from flashsim.backends.cupy_gpu.decode import Workspace

        given = {"head_dim_v": VALUES, "scale": SCALE, "workspace": Workspace()}
        if page:
            batch, keys = k.shape[0], k.shape[2]
            k = k.view(-1, 1, page, WIDTH)
            order = self.torch.randperm(batch * keys // page, device="cuda").int()
            given["block_table"] = order.view(batch, -1)
        how = {"algorithm": "flash-decode", "backend": "cupy", **given}
        return lambda: flashsim.run(q, k, None, **how)

    def _off(self, q: Any, k: Any, work: Callable[[], Any]) -> float:
        few, latent = q[:2].float(), k[:2, 0].float()
        scores = self.torch.einsum("bhqd,bnd->bhqn", few, latent) * SCALE
        truth = self.torch.einsum("bhqn,bnd->bhqd", scores.softmax(-1), latent[..., :VALUES])
        return float((work().out[:2] - truth).abs().max())


def _splits(n_q: int, batch: int, keys: int) -> int:
    from flashsim import Problem
    from flashsim.backends.cupy_gpu.engine import gpu_of
    from flashsim.backends.launch_policy import decode

    p = Problem(
        *(n_q, keys, WIDTH, VALUES),
        batch=batch,
        heads=HEADS,
        kv_heads=1,
        dtype="bfloat16",
        latent=True,
        scale=SCALE,
    )
    return decode.plan(p, (keys,) * batch, gpu_of(0)).splits[0]


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", default="latent.csv", help="where the table goes")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    bench = Latent(options.repetitions)
    with Path(options.csv).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for n_q in (1, 2):
            for batch, keys in SHAPES:
                for r in bench.measured(n_q, batch, keys):
                    writer.writerow(r)
                    where = f"{batch} x {keys}, n_q {n_q}, pages of {r['page']}"
                    speed = f"{r['tflop_per_s']:6.1f} TFLOP/s {r['tb_per_s']:5.2f} TB/s"
                    off = f"  differs by {r['difference']:.1e}" if r["difference"] != "" else ""
                    print(f"{where:36} {r['splits']:>3} {r['us']:8.1f} us {speed}{off}", flush=True)


if __name__ == "__main__":
    main()
