"""Wrong solutions of the exercises for kernels: what is changed, and what must be said of it."""

from pathlib import Path

PALLAS = Path(__file__).parents[2] / "examples/pallas/gpu_forward.py"
V_MASK = "v = tl.load(v_ptr + tile, mask=cols[:, None] < n, other=0.0)"

#: Exercise, text of the reference, what replaces it, kind of the first mark lost, and words.
WRONG = [
    ("kernel-softmax-matmul", "acc * alpha[:, None] + tl.dot", "acc + tl.dot", "result",
     "O is not multiplied by exp(m_old - m_new)"),
    ("kernel-softmax-matmul", "l * alpha + tl.sum(p, 1)", "l + tl.sum(p, 1)", "result",
     "l is not multiplied by exp(m_old - m_new)"),
    ("kernel-softmax-matmul", "acc / l[:, None]", "acc", "result", "O is not divided by l"),
    ("kernel-softmax-matmul", "        m_new =",
     "        s = tl.load(s_ptr + rows[:, None] * d2 + cols[None, :], mask=inside, "
     'other=float("-inf"))\n        m_new =', "bytes", "each S tile is loaded twice"),
    ("kernel-softmax-matmul", 'mask=inside, other=float("-inf")', "mask=inside, other=0.0",
     "result", "the padded keys of the last tile are not masked"),
    ("kernel-softmax-matmul", "d[None, :], mask=cols[:, None] < d2, other=0.0)", "d[None, :])",
     "result", "load outside of V"),
    ("kernel-softmax-matmul", "acc / l[:, None], mask=rows[:, None] < d1)", "acc / l[:, None])",
     "outside", "store outside of O"),
    ("kernel-softmax-matmul", "for first in range(0, d2, BLOCK_2)",
     "for first in range(0, d2 // BLOCK_2 * BLOCK_2, BLOCK_2)", "result",
     "the last key tile, which is not whole, is left out"),
    ("kernel-forward", " * scale, float", ", float", "result",
     "the scores are not multiplied by the scale"),
    ("kernel-forward", "m + tl.log(l)", "m + tl.log2(l)", "result", "m + log2(l)"),
    ("kernel-forward", "m + tl.log(l)", "m", "result", "the LSE is m alone"),
    ("kernel-forward", "keep = cols[None, :] < n", "keep = cols[None, :] < n + BLOCK_K", "result",
     "the padded keys of the last tile are not masked"),
    ("kernel-forward", "        m = m_new", "        acc = acc / l[:, None]\n        m = m_new",
     "result", "O is divided by l in every iteration"),
    ("kernel-forward", "cols = first + tl", "cols = first // BLOCK_K + tl", "result",
     "its index is not multiplied by the tile"),
    ("kernel-forward", "        m = m_new",
     "        m = m_new\n        if first + BLOCK_K >= n:\n            break", "compile",
     "cannot compile flash_forward for a GPU, although its interpreter runs it"),
    ("kernel-forward", "        " + V_MASK, f"        {V_MASK}\n        {V_MASK}", "bytes",
     "each V tile is loaded twice by every program"),
    ("kernel-forward", "        keep = cols",
     "        q = tl.load(q_ptr + own, mask=rows[:, None] < n, other=0.0)\n        keep = cols",
     "bytes", "load Q: "),
    ("kernel-forward", "tile = base + cols", "tile = cols", "result",
     "all heads read K and V of the first head"),
    ("kernel-forward", "block_q=32, block_k=32", "block_q=32, block_k=128", "overflow",
     "use smaller tiles"),
    ("kernel-forward", "block_q=32, block_k=32", "block_q=16, block_k=32", "bytes",
     "your tiles are 16 x 32"),
    ("kernel-causal", "tl.minimum((i + 1) * BLOCK_Q, n) if causal else n", "n", "bytes",
     "K tiles whose scores are all masked are loaded, by"),
    ("kernel-causal", "rows[:, None] >= cols", "rows[:, None] > cols", "result",
     "a query does not see its own key (> instead of >=)"),
    ("kernel-causal", "keep = keep & (rows[:, None] >= cols[None, :])", "pass", "result",
     "there is no causal mask"),
    ("kernel-forward", "    grid = (", "    q *= 2\n    grid = (", "outside",
     "the kernels load numbers that were computed outside of the kernels: Q; compute"),
    ("kernel-forward", "[grid](q, k, v, o", "[grid](q * 1.0, k, v, o", "outside",
     "the kernels load numbers that were computed outside of the kernels: q_ptr; compute"),
    ("kernel-backward", "dk += tl.dot(tl.trans(ds), q) * scale", "dk += tl.dot(tl.trans(ds), q)",
     "result", "dK is not multiplied by the scale"),
    ("kernel-backward", "dq += tl.dot(ds, k) * scale", "dq += tl.dot(ds, k)", "result",
     "dQ is not multiplied by the scale"),
    ("kernel-backward", "begin = (j * BLOCK_K) // BLOCK_Q * BLOCK_Q if causal else 0", "begin = 0",
     "bytes", "tiles whose scores are all masked are loaded"),
    ("kernel-backward", "dq += tl.dot(ds, k)", "dq = tl.dot(ds, k)", "result",
     "dQ has only the last key tile's contribution"),
    ("kernel-backward", "tl.store(dq_ptr + own, dq, mask=rows[:, None] < n)",
     "tl.store(dq_ptr + own, dq, mask=rows[:, None] < n - 1)", "result", "was never stored"),
    ("kernel-backward", "tl.sum(o * do, 1), mask=rows < n", "0.0 * rows, mask=rows < n", "result",
     "delta"),
]  # fmt: skip
#: Of the Pallas example, handed in for an exercise.
WRONG_PALLAS = [
    ("kernel-forward", "acc * alpha[:, None] + pv", "acc + pv", "result",
     "O is not multiplied by exp(m_old - m_new)"),
    ("kernel-forward", "m + jnp.log(l)", "m", "result", "the LSE is m alone"),
    ("kernel-forward", "m_new, l * alpha +", "m_new, l +", "result",
     "l is not multiplied by exp(m_old - m_new)"),
    ("kernel-causal", "end if causal else pl.cdiv(n, block_k)", "pl.cdiv(n, block_k)", "bytes",
     "K tiles whose scores are all masked are loaded"),
    ("kernel-causal", "rows[:, None] >= keys", "rows[:, None] > keys", "result",
     "a query does not see its own key (> instead of >=)"),
    ("kernel-forward", "(q, k, v)\n\n\nif", "(q * 1.0, k, v)\n\n\nif", "outside",
     "JAX computed mul"),
]  # fmt: skip


def pallas_source():
    """The example in smaller tiles, as the exercises want them."""
    text = PALLAS.read_text(encoding="utf-8")
    return text.replace("block_q=64, block_k=32", "block_q=32, block_k=32")
