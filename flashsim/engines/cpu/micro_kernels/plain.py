"""The CPU engine's operations on one panel, defined in plain Numba.

A *panel* is a block of rows, each of which has ``width`` lanes side by side. A lane is a query in
the forward pass and for dQ, and a key for dK and dV. If lanes are queries, a panel is a transposed
tile, as in S^T = K Q^T and O^T += V^T P^T. So the softmax needs no shuffles between lanes, and K
and V are read in memory order, one scalar at a time. Only Q is transposed, once per loop over key
tiles. Arrays are flat: ``S[s0 + r * ld + c]`` is row r, lane c.

On CPUs with known vector registers (`registers.py`), vector code replaces each function. The
decorator `vector.operation` names a function's vector code. The type of the first argument, `cpu`,
selects vector or plain code; tests compare both.
"""

import numpy as np

from flashsim.engines.cpu.bf16_dot.codegen import build_any_product
from flashsim.engines.cpu.micro_kernels import codegen, decode_gemv, float16
from flashsim.engines.cpu.micro_kernels.decode_gemv_bf16 import build_side_by_side
from flashsim.engines.cpu.micro_kernels.vector import operation, operation_by_kind
from flashsim.engines.cpu.primitives.inline_jit import part

LOG2E = 1.4426950408889634


@operation("a o0 i a o1 i i a o2 i i i", build_any_product, mode="set")
def product_set(cpu, C, c0, ldc, A, a0, row, step, B, b0, ldb, rows, n):
    """Compute C = A B for C (rows, width), A (rows, n) and B (n, width).

    `row` and `step` are the strides of A. If the CPU multiplies bfloat16 pairs (`Blocking.pairs`),
    elements are pairs, products are dot products, and A's rows are contiguous.
    """
    for r in range(rows):
        for c in range(cpu.width):
            total = C.dtype.type(0)
            for x in range(n):
                total += A[a0 + r * row + x * step] * B[b0 + x * ldb + c]
            C[c0 + r * ldc + c] = total


@operation("a o0 i a o1 i i a o2 i i i", build_any_product, mode="add")
def product_add(cpu, C, c0, ldc, A, a0, row, step, B, b0, ldb, rows, n):
    """Compute C += A B; the arguments are those of `product_set`."""
    for r in range(rows):
        for c in range(cpu.width):
            total = C[c0 + r * ldc + c]
            for x in range(n):
                total += A[a0 + r * row + x * step] * B[b0 + x * ldb + c]
            C[c0 + r * ldc + c] = total


@operation("a o0 i a o1 i i a o2 i i i a o3", codegen.build_product, mode="rescale")
def product_rescale(cpu, C, c0, ldc, A, a0, row, step, B, b0, ldb, rows, n, alpha, alpha0):
    """Compute C = alpha C + A B, where each lane of C has one alpha."""
    for r in range(rows):
        for c in range(cpu.width):
            total = C[c0 + r * ldc + c] * alpha[alpha0 + c]
            for x in range(n):
                total += A[a0 + r * row + x * step] * B[b0 + x * ldb + c]
            C[c0 + r * ldc + c] = total


@operation("a o0 i a a a o1,2,3", codegen.build_online_softmax)
def online_softmax(cpu, S, s0, rows, m, l, alpha, at):
    """Run one online-softmax step in each lane: replace S by P, and update m, l and alpha.

    The rows of `S` have stride `width`. P is 2^((S - m) log2 e). The maximum m is subtracted before
    the scaling, because users often mask padding with the smallest finite number, for which S log2
    e overflows. If a lane has seen no key, or only scores that count as masked, 0 replaces m (to
    avoid inf - inf), and the lane's P and l are 0.
    """
    log2e = S.dtype.type(LOG2E)
    for c in range(cpu.width):
        top = m[at + c]
        for r in range(rows):
            top = max(top, S[s0 + r * cpu.width + c])
        base = top if top > np.finfo(S.dtype).min / 2 else S.dtype.type(0)
        alpha[at + c] = np.exp2((m[at + c] - base) * log2e)
        m[at + c] = top
        # Separate sums of even and odd rows have smaller rounding errors.
        even = odd = S.dtype.type(0)
        for r in range(rows):
            p = np.exp2((S[s0 + r * cpu.width + c] - base) * log2e)
            S[s0 + r * cpu.width + c] = p
            even, odd = odd, even + p
        l[at + c] = alpha[at + c] * l[at + c] + (even + odd)


@operation("a o0 a o1 i i a a o2,3", codegen.build_grad_scores, by_row=True)
def grad_scores_by_row(cpu, S, s0, dP, d0, ld, rows, L, delta, l0):
    """Replace S by P = exp(S - L) and dP by dS = P (dP - delta), with one L and delta per row."""
    log2e = S.dtype.type(LOG2E)
    for r in range(rows):
        for c in range(cpu.width):
            p = np.exp2((S[s0 + r * ld + c] - L[l0 + r]) * log2e)
            S[s0 + r * ld + c] = p
            dP[d0 + r * ld + c] = p * (dP[d0 + r * ld + c] - delta[l0 + r])


@operation("a o0 a o1 i i a a o2,3", codegen.build_grad_scores, by_row=False)
def grad_scores_by_lane(cpu, S, s0, dP, d0, ld, rows, L, delta, l0):
    """Replace S by P = exp(S - L) and dP by dS = P (dP - delta), with one L and delta per lane."""
    log2e = S.dtype.type(LOG2E)
    for r in range(rows):
        for c in range(cpu.width):
            p = np.exp2((S[s0 + r * ld + c] - L[l0 + c]) * log2e)
            S[s0 + r * ld + c] = p
            dP[d0 + r * ld + c] = p * (dP[d0 + r * ld + c] - delta[l0 + c])


@operation("a o0 i i a", codegen.build_soft_cap, gated=False)
def soft_cap(cpu, S, s0, ld, rows, c):
    """Replace S by c tanh(S / c), where the softcap c is ``c[0]``."""
    for r in range(rows):
        for at in range(s0 + r * ld, s0 + r * ld + cpu.width):
            S[at] = c[0] * np.tanh(S[at] / c[0])


@operation("a o0 i i a a o2", codegen.build_soft_cap, gated=True)
def soft_cap_gated(cpu, S, s0, ld, rows, c, gate, g0):
    """Replace S by c tanh(S / c), and write the derivative, 1 - tanh^2, to `gate` in S's layout."""
    for r in range(rows):
        for x in range(r * ld, r * ld + cpu.width):
            t = np.tanh(S[s0 + x] / c[0])
            S[s0 + x] = c[0] * t
            gate[g0 + x] = 1 - t * t


@operation_by_kind("a i i", build_side_by_side)
def side_by_side(cpu, Q, ld, rows, kind):
    """Rearrange Q (rows, ld) for the function `dots`; plain code leaves Q unchanged.

    If the CPU multiplies bfloat16 pairs, a row's pairs go to the row's first half, and zeros to the
    second half. For AMX tiles, 16 rows of Q are packed side by side.
    """


@operation_by_kind("a i a i i a o2 i i i a", decode_gemv.build_dots)
def dots(cpu, S, ld, K, k0, d, Q, q0, ldq, rows, heads, factor, kind):
    """Compute S (heads, rows) = factor[0] Q K^T, from Q (heads, d) and K (rows, d).

    The function `side_by_side` must have rearranged Q. Vector code reads Q's rows up to a multiple
    of 32 columns; columns from d on must be 0. Vector code writes S for a multiple of 4 rows of K
    (32 with AMX tiles). For AMX tiles, Q must have memory for 16 heads.
    """
    for h in range(heads):
        for r in range(rows):
            total = S.dtype.type(0)
            for x in range(d):
                total += number_at(K, k0 + r * d + x, kind) * Q[q0 + h * ldq + x]
            S[h * ld + r] = factor[0] * total


@operation_by_kind("a i i i a a a o1,2,3", decode_gemv.build_softmax_along)
def softmax_along(cpu, S, ld, heads, n, m, l, alpha, at, kind):
    """Run one step of the online softmax along the rows of S (heads, n), one row per head.

    The row length n must be a multiple of 32. For 16-bit inputs, P is rounded to the inputs' type,
    but l adds unrounded elements of P. If the CPU multiplies bfloat16 pairs, P is stored as pairs
    of neighbours in each row's first half.
    """
    log2e = S.dtype.type(LOG2E)
    for h in range(heads):
        top = m[at + h]
        for x in range(h * ld, h * ld + n):
            top = max(top, S[x])
        base = top if top > np.finfo(S.dtype).min / 2 else S.dtype.type(0)
        alpha[at + h] = np.exp2((m[at + h] - base) * log2e)
        m[at + h] = top
        total = S.dtype.type(0)
        for x in range(h * ld, h * ld + n):
            S[x] = np.exp2((S[x] - base) * log2e)
            total += S[x]
            if kind is not None:
                S[x] = rounded_number(S[x], kind)
        l[at + h] = alpha[at + h] * l[at + h] + total


@operation_by_kind("a o0 i a i a i i i i", decode_gemv.build_weigh)
def weigh(cpu, O, o0, ldo, P, ldp, V, v0, dv, keys, heads, kind):
    """Compute O (heads, dv) += P V, from P (heads, keys) of `softmax_along` and V (keys, dv).

    If V contains 16-bit numbers, P must have V's type. Vector code also adds zeros to columns of O
    from dv on, up to a multiple of 32. For AMX tiles, O and P must have memory for 16 heads.
    """
    for h in range(heads):
        for x in range(dv):
            total = O.dtype.type(0)
            for r in range(keys):
                total += P[h * ldp + r] * number_at(V, v0 + r * dv + x, kind)
            O[o0 + h * ldo + x] += total


@operation("a a o1 i i i a", codegen.build_transpose, out=False)
def transpose_in(cpu, panels, X, x0, rows, cols, d, factors):
    """Transpose `cols` columns of X (rows, d) into panels, times a factor per row (see `pack`)."""
    w = cpu.width
    for row in range(rows):
        for x in range(cols):
            panels[(row // w * d + x) * w + row % w] = X[x0 + row * d + x] * factors[row]


@operation("a a o1 i i i a", codegen.build_transpose, out=True)
def transpose_out(cpu, panels, X, x0, rows, cols, d, factors):
    """Transpose panels back into rows of X: the reverse of `transpose_in`."""
    w = cpu.width
    for row in range(rows):
        for x in range(cols):
            X[x0 + row * d + x] = panels[(row // w * d + x) * w + row % w] * factors[row]


@operation_by_kind("a o0 i i", float16.build_round)
def round_panel(cpu, X, x0, ld, rows, kind):
    """Round each number of a panel to the inputs' 16-bit type, if any, and store it as float32.

    Ties are rounded to even. For float16, numbers from 65520 on become infinity. NaN stays NaN.
    """
    if kind is None:
        return
    for r in range(rows):
        for at in range(x0 + r * ld, x0 + r * ld + cpu.width):
            X[at] = rounded_number(X[at], kind)


@operation_by_kind("a o0 a i i", float16.build_convert, narrow=False)
def widen(cpu, floats, f0, halves, h0, n, kind):
    """Convert n 16-bit numbers (BFLOAT16 or FLOAT16) exactly to floats."""
    bits = halves.view(np.uint16)
    for i in range(n):
        value = number_of(bits[h0 + i])
        if kind != float16.BFLOAT16:
            value = _number_of_float16(np.uint32(bits[h0 + i]))
        floats[f0 + i] = value


@operation_by_kind("a o0 a i i", float16.build_convert, narrow=True)
def narrow(cpu, floats, f0, halves, h0, n, kind):
    """Round n floats to 16-bit numbers, ties to even; in float16, large ones become infinity."""
    bits = halves.view(np.uint16)
    for i in range(n):
        value = np.float32(floats[f0 + i])
        bits[h0 + i] = np.uint16(
            bits_of(value) if kind == float16.BFLOAT16 else _bits_of_float16(value)
        )


@part
def number_at(X, i, kind):
    """Return number i of an array as a float; `kind` is a 16-bit type, or None for floats."""
    if kind is None:
        return X[i]
    bits = X.view(np.uint16)[i]
    return number_of(bits) if kind == float16.BFLOAT16 else _number_of_float16(np.uint32(bits))


@part
def rounded_number(x, kind):
    """Round a float to a 16-bit type, and return the result as a float."""
    if kind == float16.BFLOAT16:
        return number_of(bits_of(x))
    return _number_of_float16(_bits_of_float16(x))


@part
def bits_of(x):
    """Return the bits of the bfloat16 nearest to a float32, ties to even, as a 32-bit integer."""
    bits = np.float32(x).view(np.uint32)
    if x != x:  # rounding could carry a NaN into a number
        return np.uint32((bits | np.uint32(1 << 22)) >> np.uint32(16))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@part
def number_of(bits):
    """Return the float32 with the same value as the bfloat16 that has these bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@part
def _number_of_float16(bits):
    """Return the float32 with the same value as the float16 that has these bits."""
    sign, size = np.uint32(0x8000), np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    value = size.view(np.float32) * np.float32(2.0**112)
    if value >= np.float32(2.0**16):  # infinity and NaN
        value = np.uint32(size | np.uint32(0x7F800000)).view(np.float32)
    return -value if bits & sign else value


@part
def _bits_of_float16(x):
    """Return the bits of the float16 nearest to a float32, ties to even, as a 32-bit integer."""
    u, half = np.float32(x).view(np.uint32), np.float32(0.5)
    sign, size = np.uint32((u >> np.uint32(16)) & np.uint32(0x8000)), np.float32(abs(x))
    if not size < np.float32(65520):
        bits = np.uint32(0x7C00 if size == size else 0x7E00)
    elif size < np.float32(2.0**-14):  # subnormal: a multiple of 2^-24, the ulp of 1/2
        bits = np.uint32(np.float32(size + half).view(np.uint32) - half.view(np.uint32))
    else:
        rounded = _drop(size.view(np.uint32), np.uint32(13))
        bits = np.uint32((rounded >> np.uint32(13)) - np.uint32(112 << 10))
    return np.uint32(sign | bits)


@part
def _drop(u, n):
    """Round the float32 with bits `u` to n fewer mantissa bits (to nearest, ties to even)."""
    unit = np.uint32(1)
    even = (u >> n) & unit
    return np.uint32((u + (unit << (n - unit)) - unit + even) >> n << n)
