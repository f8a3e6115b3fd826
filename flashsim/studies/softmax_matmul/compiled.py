"""The fused softmax-product on the CPU's cores, compiled by Numba; it counts no bytes."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numba import njit

from flashsim.l2.compiled import keep


def forward(x: np.ndarray, v: np.ndarray, block_1: int, block_2: int) -> np.ndarray:
    """Return softmax(X) V, a float32 array of shape (batch, d1, d3), using one thread per core."""
    x, v = np.ascontiguousarray(x).view(), np.ascontiguousarray(v).view()
    x.flags.writeable = v.flags.writeable = False  # one compilation for all libraries' arrays
    out = np.empty((*x.shape[:2], v.shape[2]), np.float32)
    tiles = x.shape[0] * -(-x.shape[1] // block_1)
    threads = min(tiles, os.cpu_count() or 1)
    ends = [tiles * n // threads for n in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        arguments: Any = (x, v, out, block_1, block_2)
        for done in [pool.submit(_walk, *arguments, *span) for span in pairwise(ends)]:
            done.result()
    return out


@keep
@njit(nogil=True, fastmath={"contract"})
def _walk(x, v, out, block_1, block_2, first, last):
    """Compute the result's row tiles `first` to `last` - 1, numbered over all matrices."""
    _, d1, d2 = x.shape
    d3 = v.shape[2]
    tiles = (d1 + block_1 - 1) // block_1
    P = np.empty((block_1, block_2), np.float32)
    O = np.empty((block_1, d3), np.float32)
    m, l = np.empty(block_1, np.float32), np.empty(block_1, np.float32)
    for item in range(first, last):
        b, start = item // tiles, item % tiles * block_1
        rows = min(block_1, d1 - start)
        O[:], l[:], m[:] = 0.0, 0.0, -np.inf
        for key in range(0, d2, block_2):
            keys = min(block_2, d2 - key)
            for r in range(rows):
                scores = x[b, start + r, key : key + keys]
                top = m[r]
                for c in range(keys):
                    top = max(top, scores[c])
                # Avoids inf - inf in a row of only -inf.
                base = np.float32(0.0) if top == -np.inf else top
                alpha = np.exp(m[r] - base)
                total = np.float32(0.0)
                for c in range(keys):
                    p = np.exp(scores[c] - base)
                    P[r, c] = p
                    total += p
                l[r] = l[r] * alpha + total
                m[r] = top
                for n in range(d3):
                    O[r, n] *= alpha
            for r in range(rows):
                c = 0
                while c + 4 <= keys:  # one pass over O adds four rows of V
                    p0, p1, p2, p3 = P[r, c], P[r, c + 1], P[r, c + 2], P[r, c + 3]
                    v0, v1 = v[b, key + c], v[b, key + c + 1]
                    v2, v3 = v[b, key + c + 2], v[b, key + c + 3]
                    for n in range(d3):
                        O[r, n] += p0 * v0[n] + p1 * v1[n] + p2 * v2[n] + p3 * v3[n]
                    c += 4
                for c in range(keys // 4 * 4, keys):
                    for n in range(d3):
                        O[r, n] += P[r, c] * v[b, key + c, n]
        for r in range(rows):
            for n in range(d3):
                out[b, start + r, n] = O[r, n] / l[r] if l[r] != 0 else np.nan
