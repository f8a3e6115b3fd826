"""FlashAttention-2 in plain Numba-CUDA, for learning: one thread per row, and no tensor cores.

The kernels follow Algorithms 1 and 2 of arXiv:2307.08691 step by step, and compute in float32. The
grid of thread blocks is (tile, batch * heads). The schedule's tables list the tiles to visit;
kernels do not evaluate the mask to skip tiles. The teaching kernels run on any NVIDIA GPU, and
without a GPU in Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``).

The tables ``rows`` and ``cols`` hold four numbers per tile: start, stop, offset, and where the
sequence ends on the other axis. ``ptr``, ``index`` and ``kind`` list the visited tiles in CSR form.
With `counts`, a kernel sums the bytes that it moves, in ``tile_counts`` (heads of the loop, tiles,
8) and ``visit_counts`` (batch * heads, visits, 8).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from numba import cuda, float32

from flashsim.backends.numba_gpu.teaching.functions import TracedFunctions, compiled

NO_FUNCTIONS = TracedFunctions(None, None, (), sinks=False)


@dataclass(frozen=True)
class TeachingShape:
    """A teaching kernel's compile-time constants, such as the sizes of its shared-memory tiles."""

    block_q: int
    block_k: int
    d: int
    dv: int
    group: int
    softcap: bool
    itemsize: int
    counts: bool
    fused: bool = False
    dlse: bool = False
    functions: TracedFunctions = NO_FUNCTIONS


@cuda.jit(device=True, inline="always")
def _keeps(query, key, offset, key_stop, left, right):
    """Return whether the causal and window limits let this query see this key."""
    centre = query + offset
    return key < key_stop and centre - left <= key and key <= centre + right


@cuda.jit(device=True, inline="always")
def _load(tile, X, batch, head, start, stop, width):
    """Copy rows of X to a tile in shared memory; return how many elements this thread copied.

    Rows of the tile from `stop` on are set to 0. All threads of the block must call this function,
    since neighbouring threads read neighbouring elements.
    """
    moved = 0
    for e in range(cuda.threadIdx.x, tile.shape[0] * width, cuda.blockDim.x):
        y, x = e // width, e % width
        if start + y < stop:
            tile[y, x] = X[batch, head, start + y, x]
            moved += 1
        else:
            tile[y, x] = float32(0)
    return moved


@lru_cache(maxsize=64)
def forward_kernel(shape: TeachingShape) -> Any:
    """Return the forward kernel; block (i, head) computes row tile i, with one thread per row."""
    block_q, block_k, d, dv = shape.block_q, shape.block_k, shape.d, shape.dv
    group, softcap, itemsize, counts = shape.group, shape.softcap, shape.itemsize, shape.counts
    d_pad, dv_pad, block_k_pad = d + 1, dv + 1, block_k + 1  # odd strides: no bank conflicts
    keep, score, _, _ = compiled(shape.functions)
    has_sinks = shape.functions.sinks

    @cuda.jit
    def flash_forward(
        Q, K, V, O, L, floats, wholes, sinks,
        rows, cols, ptr, index, kind, left, right, scale, cap, tile_counts, visit_counts,
    ):  # fmt: skip
        # -- Phase 0: what this block owns ------------------------------------------------------
        i, walk, r = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        heads = Q.shape[1]
        batch, head = walk // heads, walk % heads
        kv_head = head // group
        start, n_rows, offset = rows[i, 0], rows[i, 1] - rows[i, 0], rows[i, 2]
        tQ = cuda.shared.array((block_q, d_pad), float32)  # the whole block
        tK = cuda.shared.array((block_k, d_pad), float32)  # one visit
        tV = cuda.shared.array((block_k, dv_pad), float32)  # one visit
        tS = cuda.shared.array((block_q, block_k_pad), float32)  # one visit: scores, then P
        tO = cuda.shared.array((block_q, dv_pad), float32)  # the whole block
        m, l = float32(-math.inf), float32(0)
        if has_sinks:  # a sink is a score without a value
            m, l = sinks[head], float32(1)
        # -- Phase 1: load Q, clear O -----------------------------------------------------------
        moved = _load(tQ, Q, batch, head, start, start + n_rows, d)
        if counts:
            cuda.atomic.add(tile_counts, (walk, i, 0), moved * itemsize)
        for x in range(dv):
            tO[r, x] = float32(0)
        for v in range(ptr[i], ptr[i + 1]):
            # -- Phase 2: load K_j, V_j ---------------------------------------------------------
            first, key_stop = cols[index[v], 0], cols[index[v], 1]
            moved_k = _load(tK, K, batch, kv_head, first, key_stop, d)
            moved_v = _load(tV, V, batch, kv_head, first, key_stop, dv)
            if counts:
                cuda.atomic.add(visit_counts, (walk, v, 0), moved_k * itemsize)
                cuda.atomic.add(visit_counts, (walk, v, 1), moved_v * itemsize)
            cuda.syncthreads()  # B1: tQ, tK and tV are complete before any thread reads them
            # -- Phase 3: S = scale Q K^T, capped and masked; m_new = max(m, rowmax S) ----------
            m_new = m
            for c in range(block_k):
                s = float32(0)
                for x in range(d):
                    s += tQ[r, x] * tK[c, x]
                s *= scale
                if softcap:
                    s = cap * math.tanh(s / cap)
                key = first + c
                s = score(floats, wholes, s, batch, head, start + r, key)
                if kind[v] != 0 and not (
                    _keeps(start + r, key, offset, key_stop, left, right)
                    and keep(floats, wholes, batch, head, start + r, key)
                ):
                    s = float32(-math.inf)
                tS[r, c] = s
                m_new = max(m_new, s)
            # -- Phase 4: P = exp(S - m_new); l = alpha l + rowsum P ----------------------------
            base = float32(0) if m_new == -math.inf else m_new  # no key yet: avoids inf - inf
            alpha = math.exp(m - base)
            l *= alpha
            for c in range(block_k):
                tS[r, c] = math.exp(tS[r, c] - base)
                l += tS[r, c]
            m = m_new
            # -- Phase 5: O = alpha O + P V; row r by thread r alone, so no barrier -------------
            for x in range(dv):
                o = alpha * tO[r, x]
                for c in range(block_k):
                    o += tS[r, c] * tV[c, x]
                tO[r, x] = o
            cuda.syncthreads()  # B2: all have read tK and tV; the next visit overwrites them
        # -- Phase 6: O /= l, L = m + log l -----------------------------------------------------
        if r < n_rows:
            for x in range(dv):
                O[batch, head, start + r, x] = tO[r, x] / l if l > 0 else float32(0)
            L[batch, head, start + r] = m + math.log(l) if l > 0 else -math.inf
            if counts:
                cuda.atomic.add(tile_counts, (walk, i, 1), dv * itemsize)
                cuda.atomic.add(tile_counts, (walk, i, 2), 4)

    return flash_forward


@lru_cache(maxsize=64)
def delta_kernel(shape: TeachingShape) -> Any:
    """Return the kernel that computes delta = rowsum(dO * O) and clears dQ's accumulator.

    Thread r computes row r of a block's row tile. If the LSE has a gradient dL, delta is reduced by
    dL.
    """
    d, dv, itemsize, counts, fused = shape.d, shape.dv, shape.itemsize, shape.counts, shape.fused
    dlse, delta_slot = shape.dlse, 3 if shape.dlse else 2

    @cuda.jit
    def flash_delta(O, dO, delta, dQ, dL, rows, tile_counts):
        i, walk, r = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        batch, head, row = walk // O.shape[1], walk % O.shape[1], rows[i, 0] + r
        if row < rows[i, 1]:
            total = float32(0)
            for x in range(dv):
                total += float32(O[batch, head, row, x]) * float32(dO[batch, head, row, x])
            if dlse:
                total -= dL[batch, head, row]
            delta[batch, head, row] = total
            if fused:
                for x in range(d):
                    dQ[batch, head, row, x] = float32(0)
            if counts:
                cuda.atomic.add(tile_counts, (walk, i, 0), dv * itemsize)
                cuda.atomic.add(tile_counts, (walk, i, 1), dv * itemsize)
                if dlse:
                    cuda.atomic.add(tile_counts, (walk, i, 2), 4)
                cuda.atomic.add(tile_counts, (walk, i, delta_slot), 4)
                cuda.atomic.add(tile_counts, (walk, i, delta_slot + 1), d * 4 if fused else 0)

    return flash_delta


@lru_cache(maxsize=64)
def dkdv_kernel(shape: TeachingShape) -> Any:
    """Return the kernel for dK and dV.

    Block (j, KV head) computes column tile j, and thread c computes key c of this tile. With
    `fused`, the kernel also adds dS K to a float32 dQ in HBM, atomically.
    """
    block_q, block_k, d, dv = shape.block_q, shape.block_k, shape.d, shape.dv
    group, softcap, itemsize, counts = shape.group, shape.softcap, shape.itemsize, shape.counts
    fused = shape.fused
    d_pad, dv_pad, block_k_pad = d + 1, dv + 1, block_k + 1
    keep, score, score_slope, _ = compiled(shape.functions)

    @cuda.jit
    def flash_dkdv(
        Q, K, V, dO, L, delta, dQ, dK, dV, floats, wholes, sums,
        rows, cols, ptr, index, kind, left, right, scale, cap, tile_counts, visit_counts,
    ):  # fmt: skip
        # -- Phase 0: what this block owns ------------------------------------------------------
        j, walk, c = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        kv_heads = K.shape[1]
        batch, kv_head = walk // kv_heads, walk % kv_heads
        first, n_cols, offset = cols[j, 0], cols[j, 1] - cols[j, 0], cols[j, 2]
        tK = cuda.shared.array((block_k, d_pad), float32)  # the whole block
        tV = cuda.shared.array((block_k, dv_pad), float32)  # the whole block
        tdK = cuda.shared.array((block_k, d_pad), float32)  # the whole block
        tdV = cuda.shared.array((block_k, dv_pad), float32)  # the whole block
        tQ = cuda.shared.array((block_q, d_pad), float32)  # one visit
        tdO = cuda.shared.array((block_q, dv_pad), float32)  # one visit
        tdS = cuda.shared.array((block_q, block_k_pad), float32)  # one visit, for dQ
        # -- Phase 1: load K, V; clear dK, dV ---------------------------------------------------
        moved_k = _load(tK, K, batch, kv_head, first, first + n_cols, d)
        moved_v = _load(tV, V, batch, kv_head, first, first + n_cols, dv)
        for x in range(d):
            tdK[c, x] = float32(0)
        for x in range(dv):
            tdV[c, x] = float32(0)
        if counts:
            cuda.atomic.add(tile_counts, (walk, j, 0), moved_k * itemsize)
            cuda.atomic.add(tile_counts, (walk, j, 1), moved_v * itemsize)
        for member in range(group):
            head = kv_head * group + member
            for v in range(ptr[j], ptr[j + 1]):
                # -- Phase 2: load Q_i, dO_i ----------------------------------------------------
                start, stop = rows[index[v], 0], rows[index[v], 1]
                moved_q = _load(tQ, Q, batch, head, start, stop, d)
                moved_do = _load(tdO, dO, batch, head, start, stop, dv)
                if counts:
                    query_walk = batch * Q.shape[1] + head
                    cuda.atomic.add(visit_counts, (query_walk, v, 0), moved_q * itemsize)
                    cuda.atomic.add(visit_counts, (query_walk, v, 1), moved_do * itemsize)
                    if c == 0:
                        cuda.atomic.add(visit_counts, (query_walk, v, 2), (stop - start) * 4)
                        cuda.atomic.add(visit_counts, (query_walk, v, 3), (stop - start) * 4)
                        if fused:
                            cuda.atomic.add(
                                visit_counts, (query_walk, v, 4), (stop - start) * d * 4
                            )
                cuda.syncthreads()  # B1: tQ and tdO (at first tK and tV too) are complete
                for y in range(min(block_q, stop - start)):
                    # -- Phase 3: S, P = exp(S - L), dP = dO V^T, dS = P (dP - delta) -----------
                    s, dp, slope = float32(0), float32(0), float32(1)
                    for x in range(d):
                        s += tQ[y, x] * tK[c, x]
                    s *= scale
                    if softcap:
                        t = math.tanh(s / cap)
                        s, slope = cap * t, 1 - t * t
                    for x in range(dv):
                        dp += tdO[y, x] * tV[c, x]
                    p, ds, query, key = float32(0), float32(0), start + y, first + c
                    if _keeps(query, key, offset, first + n_cols, left, right) and keep(
                        floats, wholes, batch, head, query, key
                    ):
                        new = score(floats, wholes, s, batch, head, query, key)
                        p = math.exp(new - L[batch, head, query])
                    if p > 0:
                        ds = p * (dp - delta[batch, head, query])
                        ds = score_slope(floats, wholes, sums, s, ds, batch, head, query, key)
                        ds *= slope * scale
                    # -- Phase 4: dV += P^T dO, dK += dS^T Q; key c by thread c alone -----------
                    for x in range(dv):
                        tdV[c, x] += p * tdO[y, x]
                    for x in range(d):
                        tdK[c, x] += ds * tQ[y, x]
                    tdS[y, c] = ds
                cuda.syncthreads()  # B2: tdS is complete; all have read tQ and tdO
                if fused:  # -- Phase 5: dQ += dS K ---------------------------------------------
                    for y in range(c, min(block_q, stop - start), block_k):
                        for x in range(d):
                            total = float32(0)
                            for key in range(block_k):
                                total += tdS[y, key] * tK[key, x]
                            cuda.atomic.add(dQ, (batch, head, start + y, x), total)
                    cuda.syncthreads()  # B3: all have read tdS; the next visit overwrites it
        # -- Phase 6: store dK, dV --------------------------------------------------------------
        if c < n_cols:
            for x in range(d):
                dK[batch, kv_head, first + c, x] = tdK[c, x]
            for x in range(dv):
                dV[batch, kv_head, first + c, x] = tdV[c, x]
            if counts:
                cuda.atomic.add(tile_counts, (walk, j, 2), d * itemsize)
                cuda.atomic.add(tile_counts, (walk, j, 3), dv * itemsize)

    return flash_dkdv


@lru_cache(maxsize=64)
def dq_kernel(shape: TeachingShape) -> Any:
    """Return the dQ kernel; block (i, head) computes row tile i, with one thread per row."""
    block_q, block_k, d, dv = shape.block_q, shape.block_k, shape.d, shape.dv
    group, softcap, itemsize, counts = shape.group, shape.softcap, shape.itemsize, shape.counts
    d_pad, dv_pad = d + 1, dv + 1
    keep, score, _, score_slope = compiled(shape.functions)

    @cuda.jit
    def flash_dq(
        Q, K, V, dO, L, delta, dQ, floats, wholes, sums,
        rows, cols, ptr, index, kind, left, right, scale, cap, tile_counts, visit_counts,
    ):  # fmt: skip
        # -- Phase 0: what this block owns ------------------------------------------------------
        i, walk, r = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        batch, head = walk // Q.shape[1], walk % Q.shape[1]
        kv_head, row, offset = head // group, rows[i, 0] + r, rows[i, 2]
        mine = row < rows[i, 1]
        tQ = cuda.shared.array((block_q, d_pad), float32)  # the whole block
        tdO = cuda.shared.array((block_q, dv_pad), float32)  # the whole block
        tdQ = cuda.shared.array((block_q, d_pad), float32)  # the whole block
        tK = cuda.shared.array((block_k, d_pad), float32)  # one visit
        tV = cuda.shared.array((block_k, dv_pad), float32)  # one visit
        # -- Phase 1: load Q, dO, and L and delta of thread r's own row -------------------------
        moved_q = _load(tQ, Q, batch, head, rows[i, 0], rows[i, 1], d)
        moved_do = _load(tdO, dO, batch, head, rows[i, 0], rows[i, 1], dv)
        for x in range(d):
            tdQ[r, x] = float32(0)
        lse = L[batch, head, row] if mine else float32(0)
        row_delta = delta[batch, head, row] if mine else float32(0)
        if counts:
            cuda.atomic.add(tile_counts, (walk, i, 0), moved_q * itemsize)
            cuda.atomic.add(tile_counts, (walk, i, 1), moved_do * itemsize)
            cuda.atomic.add(tile_counts, (walk, i, 2), 4 if mine else 0)
            cuda.atomic.add(tile_counts, (walk, i, 3), 4 if mine else 0)
        for v in range(ptr[i], ptr[i + 1]):
            # -- Phase 2: load K_j, V_j ---------------------------------------------------------
            first, key_stop = cols[index[v], 0], cols[index[v], 1]
            moved_k = _load(tK, K, batch, kv_head, first, key_stop, d)
            moved_v = _load(tV, V, batch, kv_head, first, key_stop, dv)
            if counts:
                cuda.atomic.add(visit_counts, (walk, v, 0), moved_k * itemsize)
                cuda.atomic.add(visit_counts, (walk, v, 1), moved_v * itemsize)
            cuda.syncthreads()  # B1: tK and tV (at first tQ and tdO too) are complete
            for c in range(block_k):
                # -- Phase 3: S, P = exp(S - L), dP = dO V^T, dS = P (dP - delta) ---------------
                key = first + c
                if (
                    mine
                    and _keeps(row, key, offset, key_stop, left, right)
                    and keep(floats, wholes, batch, head, row, key)
                ):
                    s, dp, slope = float32(0), float32(0), float32(1)
                    for x in range(d):
                        s += tQ[r, x] * tK[c, x]
                    s *= scale
                    if softcap:
                        t = math.tanh(s / cap)
                        s, slope = cap * t, 1 - t * t
                    for x in range(dv):
                        dp += tdO[r, x] * tV[c, x]
                    p, ds = (
                        math.exp(score(floats, wholes, s, batch, head, row, key) - lse),
                        float32(0),
                    )
                    if p > 0:
                        ds = p * (dp - row_delta)
                        ds = score_slope(floats, wholes, sums, s, ds, batch, head, row, key)
                        ds *= slope * scale
                    # -- Phase 4: dQ += dS K ----------------------------------------------------
                    for x in range(d):
                        tdQ[r, x] += ds * tK[c, x]
            cuda.syncthreads()  # B2: all have read tK and tV; the next visit overwrites them
        # -- Phase 5: store dQ ------------------------------------------------------------------
        if mine:
            for x in range(d):
                dQ[batch, head, row, x] = tdQ[r, x]
            if counts:
                cuda.atomic.add(tile_counts, (walk, i, 4), d * itemsize)

    return flash_dq


@lru_cache(maxsize=64)
def convert_kernel(shape: TeachingShape) -> Any:
    """Return the row-wise kernel that converts dQ's float32 accumulator to the inputs' type."""
    d, itemsize, counts = shape.d, shape.itemsize, shape.counts

    @cuda.jit
    def flash_convert(acc, dQ, rows, tile_counts):
        i, walk, r = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        batch, head, row = walk // dQ.shape[1], walk % dQ.shape[1], rows[i, 0] + r
        if row < rows[i, 1]:
            for x in range(d):
                dQ[batch, head, row, x] = acc[batch, head, row, x]
            if counts:
                cuda.atomic.add(tile_counts, (walk, i, 0), d * 4)
                cuda.atomic.add(tile_counts, (walk, i, 1), d * itemsize)

    return flash_convert
