"""Files as readers write them, for `flashsim kernel`: layouts, packed sequences, block pointers."""

#: One kernel, with strides; {…} are filled in by the functions below.
KERNEL = """
import numpy as np
import triton
import triton.language as tl


@triton.jit
def attend(q_ptr, k_ptr, v_ptr, o_ptr, {lse}, {offsets}q_head, q_row, kv_head, kv_row, lse_head,
           n_q, n_kv, scale, heads, CAUSAL: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    i, at = tl.program_id(0), tl.program_id(1)
    first = 0
    lse_at = {lse} + at * lse_head
    {begin}
    d = tl.arange(0, D)
    rows = i * B + tl.arange(0, B)
    own = at * q_head + (first + rows)[:, None] * q_row + d[None, :]
    q = tl.load(q_ptr + own, mask=(rows < n_q)[:, None], other=0.0)
    m = tl.full([B], float("-inf"), tl.float32)
    l = tl.zeros([B], tl.float32)
    acc = tl.zeros([B, D], tl.float32)
    end = tl.minimum((i + 1) * B + n_kv - n_q, n_kv) if CAUSAL else n_kv
    for j in range(0, end, B):
        keys = j + tl.arange(0, B)
        its = at * kv_head + (first + keys)[:, None] * kv_row + d[None, :]
        k = tl.load(k_ptr + its, mask=(keys < n_kv)[:, None], other=0.0)
        v = tl.load(v_ptr + its, mask=(keys < n_kv)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        keep = (keys < n_kv)[None, :]
        if CAUSAL:
            keep = keep & (rows[:, None] + n_kv - n_q >= keys[None, :])
        s = tl.where(keep, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = m_new
    acc = (acc / l[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + own, acc, mask=(rows < n_q)[:, None])
    tl.store(lse_at + rows, {value}, mask=rows < n_q)
"""

#: (batch, n, heads, d), as flash-attention has it; rows of the LSE are padded.
BATCH_N_HEADS = """

def attention(q, k, v, causal=False):
    batch, seqlen_q, nheads, d = q.shape
    seqlen_k = k.shape[1]
    o = np.empty_like(q)
    padded = triton.cdiv(seqlen_q, 64) * 64
    lse = np.zeros((batch, nheads, padded), np.float32)
    attend[(triton.cdiv(seqlen_q, 32), nheads)](
        q, k, v, o, lse, d, nheads * d, d, nheads * d, padded, seqlen_q, seqlen_k, d**-0.5, nheads,
        CAUSAL=causal, D=d, B=32)
    return o, lse
"""

#: All heads' rows in one matrix, one below the other, under names of tensor descriptors.
STACKED = """

def attention(q, k, v, causal=False):
    batch, heads, n, d = q.shape
    flat = [x.reshape(-1, d) for x in (q, k, v)]
    o, lse = np.empty_like(flat[0]), np.empty((batch * heads * n,), np.float32)
    attend[(triton.cdiv(n, 32), batch * heads)](
        *flat, o, lse, n * d, d, n * d, d, n, n, n, d**-0.5, heads, CAUSAL=causal, D=d, B=32)
    return o.reshape(q.shape), lse
"""

#: Sequences of 20, 0, 45 and 31 tokens, packed.
PACKED = """

def program():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 96, 2, 16), dtype=np.float32)
    o, lse = np.empty_like(q), np.empty((2, 96), np.float32)
    offsets = np.array([0, 20, 20, 65, 96], np.int32)
    attend[(2, 2, 4)](
        q, k, v, o, lse, offsets, 16, 32, 16, 32, 96, 0, 0, 0.25, 2, CAUSAL=True, D=16, B=32)


program()
"""
BEGIN = """
    first = tl.load(cu_seqlens + tl.program_id(2))
    n_q = tl.load(cu_seqlens + tl.program_id(2) + 1) - first
    n_kv = n_q
    lse_at += first
    if i * B >= n_q:
        return"""

#: Block pointers, with the result cast as courses suggest.
BLOCK_POINTERS = """
import numpy as np
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, y_ptr, n, D: tl.constexpr, B: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (n, D), (D, 1), (tl.program_id(0) * B, 0), (B, D), (1, 0))
    y = tl.make_block_ptr(y_ptr, (n, D), (D, 1), (tl.program_id(0) * B, 0), (B, D), (1, 0))
    found = 2.0 * tl.load(x, boundary_check=(0,), padding_option="zero").to(tl.float32)
    tl.store(y, found.to(y.type.element_ty), boundary_check=(0,))


def launch(x):
    y = np.zeros_like(x)
    double[(triton.cdiv(x.shape[0], 16),)](x, y, x.shape[0], D=x.shape[1], B=16)


def twice(loaded):
    return 2 * loaded["x_ptr"]
"""


def kernel(lse="lse_ptr", offsets="", begin="", value="m + tl.log(l)"):
    """The kernel's text; `lse` is the parameter that holds the LSE."""
    return KERNEL.format(lse=lse, offsets=offsets, begin=begin, value=value)
