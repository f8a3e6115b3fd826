"""What a call costs the host: python benchmarks/call.py [--backend cupy] [--kernel portable]

Medians, in microseconds, from the call of `flashsim.run` and of `Result.backward` to their return,
at N = 128: of a call made when the GPU is idle, which has to wake it, and of calls in a row. Taken
in turn, so that a slow moment of the host meets them all. On a GPU backend, with torch tensors that
lie on the GPU, the kernels run on behind the host and are not part of it; a CPU backend returns
with the result. On a GPU torch's own attention stands beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

import flashsim

HEADS, N, HEAD_DIM = 4, 128, 64
ROW = 20  # calls; far fewer than a GPU's queue takes

Work = Callable[[], object]


def microseconds(works: dict[str, Work], wait: Work, rounds: int) -> dict[str, tuple[float, float]]:
    """Medians by name: of a call alone, and of one of `ROW` in a row."""
    took: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            for calls, times in zip((1, ROW), took[name], strict=True):
                wait()
                start = time.perf_counter()
                for _ in range(calls):
                    work()
                times.append((time.perf_counter() - start) / calls * 1e6)
    return {name: (median(alone), median(row)) for name, (alone, row) in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cupy", help="as for flashsim.run")
    parser.add_argument("--kernel", help="as for flashsim.run, on GPU backends")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    given = np.random.default_rng(0).standard_normal((4, 1, HEADS, N, HEAD_DIM), dtype=np.float32)
    wait: Work = time.perf_counter  # nothing runs on
    works: dict[str, Work] = {}
    if options.backend in ("cupy", "numba_cuda"):
        import torch

        given = torch.from_numpy(given).to("cuda", torch.bfloat16)
        wait = torch.cuda.synchronize
        attention = torch.nn.functional.scaled_dot_product_attention
        works["torch forward"] = lambda: attention(*given[:3])
    more = {"kernel": options.kernel} if options.kernel else {}
    q, k, v, dout = given

    def run():
        return flashsim.run(q, k, v, backend=options.backend, **more)

    result = run()
    works["forward"] = run
    works["backward, deterministic"] = lambda: result.backward(dout, deterministic=True)
    works["backward, fused"] = lambda: result.backward(dout, deterministic=False)
    microseconds(works, wait, 3)  # compiles
    print(f"{'µs a call':24}{'alone':>8}{'in a row':>10}")
    for name, (alone, row) in microseconds(works, wait, options.rounds).items():
        print(f"{name:24}{alone:8.1f}{row:10.1f}")


if __name__ == "__main__":
    main()
