"""What a call costs the host: python benchmarks/call.py [--backend cupy] [--kernel portable]

Medians, in microseconds, from the call of `flashsim.run` and of `Result.backward` to their return,
at N = 128. On a GPU backend, with torch tensors that lie on the GPU, the kernels run on behind the
host and are not part of it; a CPU backend returns with the result. On a GPU torch's own attention
stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import flashsim

HEADS, N, HEAD_DIM = 4, 128, 64


def microseconds(work: Callable[[], object], wait: Callable[[], object], calls: int) -> float:
    """Median of the calls, the GPU idle before each."""
    took = []
    for _ in range(calls + 20):
        wait()
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return round(statistics.median(took[20:]) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cupy", help="as for flashsim.run")
    parser.add_argument("--kernel", help="as for flashsim.run, on GPU backends")
    parser.add_argument("--calls", type=int, default=500)
    options = parser.parse_args()
    given = np.random.default_rng(0).standard_normal((4, 1, HEADS, N, HEAD_DIM), dtype=np.float32)
    wait: Callable[[], object] = time.perf_counter  # nothing runs on
    works: dict[str, Callable[[], object]] = {}
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
    works["backward, three passes"] = lambda: result.backward(dout, deterministic=True)
    works["backward, fused"] = lambda: result.backward(dout, deterministic=False)
    for name, work in works.items():
        print(f"{name}: {microseconds(work, wait, options.calls)} µs")


if __name__ == "__main__":
    main()
