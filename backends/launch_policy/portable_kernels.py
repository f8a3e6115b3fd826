"""Compute the number of threads, shared memory and constants of each portable kernel."""

from flashsim.backends.launch.kernel import Gpu, Kernel, Variant, built, padded_dims
from flashsim.errors import TilingError
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

#: Possible sides of a tile.
SIDES = (16, 32, 48, 64, 80, 96, 112, 128)
#: Accumulators that a thread may hold; the rest of its 255 registers is for operands and addresses.
_ACCUMULATORS = 192


def forward_kernel(problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu) -> Kernel:
    """Return the kernel `flash_forward` for a problem, or raise `TilingError`."""
    bq, bk, d, dv = _sides(problem, tiling)
    if _plain(problem, variant):
        _require(tiling, bq // 16 * (dv // 16 + bk // 16) <= _ACCUMULATORS)
        shared = _mat(bq, d) + max(_mat(bk, d), _mat(bk, dv)) + _mat(bq, bk)
        return _kernel("forward_f32", "flash_forward", 8, shared, (problem, tiling, variant))
    size = problem.itemsize
    blocks = 2 if bq % 128 == 0 and (dv + bk) <= _ACCUMULATORS else 1  # 16-row blocks per warp
    held = blocks * (dv + bk) // 2
    _require(tiling, held <= _ACCUMULATORS)
    # A kernel that counts bytes also keeps addresses of counters. If Q left no register for them,
    # ptxas would recompute them in every visit, and give up the order of the exponentials.
    reporting = 8 if variant.counts else 0
    q_regs = held + blocks * d * size // 8 + reporting <= _ACCUMULATORS
    # Row sums move to shared memory if the registers are full.
    sums_shared = held == _ACCUMULATORS and not variant.python
    tiles = size * max(bq * d + 2 * bk * (d + dv), bq * dv)
    shared = -(-tiles // 128) * 128 + 8 * bq * 2 * sums_shared
    warps = bq // (16 * blocks)
    return _kernel(
        *("forward", "flash_forward", warps, shared, (problem, tiling, variant)),
        q_regs=int(q_regs),
        sums_shared=int(sums_shared),
    )


def dkdv_kernel(problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu) -> Kernel:
    """Return `flash_dkdv`, which computes dQ too in a fused backward, or raise `TilingError`."""
    fused = variant.fused
    bq, bk, d, dv = _sides(problem, tiling)
    if _plain(problem, variant):
        held = bk // 16 * (d + dv) // 16 + 2 * bq * bk // 256 + fused * bq // 16 * d // 16
        _require(tiling, held <= _ACCUMULATORS)
        shared = _mat(bk, d) + _mat(bk, dv) + _mat(bq, d) + _mat(bq, dv) + 2 * _mat(bq, bk)
        file, shared = "backward_dkdv_f32", shared + 8 * bq
        return _kernel(file, "flash_dkdv", 8, shared, (problem, tiling, variant), fused=int(fused))
    if variant.python:
        splits, queries = max(d, dv) > 128, bq
    else:
        splits = max(d, dv) > 64 and bq % 32 == d % 32 == dv % 32 == 0
        queries = bq // 2 if splits else bq  # queries per visit whose scores a warp computes
    parts = 2 if splits else 1
    # 16-key blocks per warp: two, if the accumulators of dK and dV leave registers for the scores.
    blocks = 2 if bk * parts % 128 == 0 and d + dv <= 128 * parts else 1
    held = blocks * (d + dv) // (2 * parts)
    capped = problem.softcap or problem.score_mod is not None
    per_query = blocks * (3 if capped else 2) / 2  # S, dP and a derivative
    chunk = next(
        (c for c in (64, 48, 32, 16) if queries % c == 0 and held + per_query * c <= _ACCUMULATORS),
        0,
    )
    warps = bk * parts // (16 * blocks)
    _require(tiling, bool(chunk))
    warps_q = max(w for w in range(1, warps + 1) if warps % w == 0 and w <= max(1, bq // 32))
    warps_q = warps_q if bq % (16 * warps_q) == 0 else 1
    trades = splits and not variant.python  # warps exchange P and dS
    # buffers of P and dS; dQ is computed a visit late
    crossing = trades + (trades or fused) + fused
    # Half of the warps compute dQ before their scores and half after them, where that was faster on
    # an H200. Elsewhere the second copy of the code needs too many registers, or was not tried.
    if variant.python:
        halves = fused and max(d, dv) in (96, 128)
    else:
        halves = fused and not variant.tf32 and (trades or max(d, dv) == 64)
    for stages in (2, 1):
        shared = problem.itemsize * ((bk + stages * bq) * (d + dv) + crossing * bq * bk)
        shared += 8 * stages * bq
        if shared <= gpu.shared_bytes:
            break
    return _kernel(
        *("backward_dkdv", "flash_dkdv", warps, shared, (problem, tiling, variant)),
        parts=parts,
        chunk=chunk,
        stages=stages,
        warps_q=warps_q,
        fused=int(fused),
        halves=int(halves),
    )


def dq_kernel(problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu) -> Kernel:
    """Return the kernel `flash_dq`, the third pass of the backward, or raise `TilingError`."""
    bq, bk, d, dv = _sides(problem, tiling)
    if _plain(problem, variant):
        _require(tiling, bq // 16 * d // 16 + 2 * bq * bk // 256 <= _ACCUMULATORS)
        shared = _mat(bq, d) + _mat(bq, dv) + _mat(bk, d) + _mat(bk, dv) + _mat(bq, bk) + 8 * bq
        return _kernel("backward_dq_f32", "flash_dq", 8, shared, (problem, tiling, variant))
    blocks = 2 if bq % 128 == 0 and d <= 64 else 1
    chunk = next((c for c in (64, 48, 32, 16) if bk % c == 0 and blocks * (d // 2 + c) <= 192), 0)
    _require(tiling, bool(chunk))
    for stages in (2, 1):
        shared = problem.itemsize * (bq * (d + dv) + stages * bk * (d + dv)) + 8 * bq
        if shared <= gpu.shared_bytes:
            break
    warps = bq // (16 * blocks)
    return _kernel(
        *("backward_dq", "flash_dq", warps, shared, (problem, tiling, variant)),
        chunk=chunk,
        stages=stages,
    )


def rows_kernel(stage: str, problem: Problem, tiling: Tiling, variant: Variant) -> Kernel:
    """Return the row-wise kernel: `flash_delta` for "delta", `flash_convert` for "convert"."""
    dlse = int(problem.dlse and stage == "delta")
    more = {"fused": int(variant.fused), "first": int(variant.first), "dlse": dlse}
    more |= {"f32": int(problem.dtype == "float32")}
    return _kernel("backward_rows", f"flash_{stage}", 8, 0, (problem, tiling, variant), **more)


#: The function that makes the kernel of each stage with visits; other stages are row-wise.
WALKING = {
    "forward": forward_kernel,
    "dkdv": dkdv_kernel,
    "fused": dkdv_kernel,
    "dq": dq_kernel,
}


def _sides(problem: Problem, tiling: Tiling) -> tuple[int, int, int, int]:
    """Return the tile's sides and the padded head dims, or raise `TilingError`."""
    bq, bk = tiling.block_q, tiling.block_k
    _require(tiling, bq in SIDES and bk in SIDES)
    return bq, bk, *padded_dims(problem)


def _plain(problem: Problem, variant: Variant) -> bool:
    """Return whether 256 threads per block compute float32 products without tensor cores."""
    return problem.dtype == "float32" and not variant.tf32


def _require(tiling: Tiling, fits: bool) -> None:
    if not fits:
        raise TilingError(
            f"there is no portable kernel for {tiling} tiles; pass another tiling=, or leave out "
            "tiling="
        )


def _mat(rows: int, cols: int) -> int:
    """Return the size in bytes of a float32 tile whose rows are padded by 16 bytes each."""
    return 4 * rows * (cols + 4)


def _kernel(
    file: str,
    name: str,
    warps: int,
    shared: int,
    made_for: tuple[Problem, Tiling, Variant],
    **more: int,
) -> Kernel:
    problem, tiling, variant = made_for
    _require(tiling, warps <= 8)
    if not _plain(problem, variant):
        shared = -(-shared // 128) * 128  # tiles for tensor cores are 128-byte aligned
    own = {"WARPS": warps, **{key.upper(): value for key, value in more.items()}}
    outer = {"backward_dkdv": "keys", "backward_rows": None}.get(
        file.removesuffix("_f32"), "queries"
    )
    return built(f"portable/{file}.cu", name, 32 * warps, shared, made_for, own, outer=outer)
