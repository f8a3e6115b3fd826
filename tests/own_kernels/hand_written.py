"""A FlashAttention-2 forward whose accesses are noted by hand, as a frontend would note them."""

import numpy as np

from flashsim import Problem, oracle
from flashsim.own_kernels import LOAD, STORE, KernelTrace, Recorder


def without_stages(transfers):
    """Return bytes by operation and tensor, over all stages."""
    found = {}
    for (_, op, tensor), nbytes in transfers.items():
        found[op, tensor] = found.get((op, tensor), 0) + nbytes
    return found


def codes_of(r, values):
    """Record float32 arrays as tensors; return the tensors' codes by name."""
    return {
        name: r.tensor(f"{name}_ptr", x.shape, [s // 4 for s in x.strides], "float32", 4)
        for name, x in values.items()
    }


def attention(
    n=256, d=64, block_q=64, block_k=32, heads=2, causal=True, twice=False, skip=True, group=1,
    given=None, column=False,
):  # fmt: skip
    """Return the trace; `twice` loads each K tile again, and ``skip=False`` keeps masked tiles.

    `given` are q, k and v, which are random by default. With `column`, L is (heads, n, 1).
    """
    p = Problem(n, head_dim=d, heads=heads, kv_heads=heads // group, causal=causal)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((heads, n, d)).astype(np.float32)
    k, v = rng.standard_normal((2, heads // group, n, d)).astype(np.float32)
    q, k, v = (q, k, v) if given is None else given
    out, lse = oracle.attention(q[None], k[None], v[None], p)
    lse = lse[0, ..., None] if column else lse[0]
    values = [q, k, v, out[0].astype(np.float32), lse.astype(np.float32)]
    r = Recorder("hand")
    names = "q", "k", "v", "o", "lse"
    q_, k_, v_, o_, l_ = codes_of(r, dict(zip(names, values, strict=True))).values()
    tiles = -(-n // block_q)
    r.launch("forward", (tiles, heads), constants={"causal": causal})
    for head in range(heads):
        for i in range(tiles):
            r.program((i, head))
            rows = slice(i * block_q, min(n, (i + 1) * block_q))
            r.block(LOAD, q_, (head, rows), line=("mine.py", 10))
            for first in range(0, rows.stop if causal and skip else n, block_k):
                cols = slice(first, min(n, first + block_k))
                r.block(LOAD, k_, (head // group, cols), line=("mine.py", 20))
                if twice:
                    r.block(LOAD, k_, (head // group, cols), line=("mine.py", 21))
                r.work("matmul", 4 * block_q * block_k * d)
                r.block(LOAD, v_, (head // group, cols), line=("mine.py", 25))
            r.held({"acc": ((block_q, d), 4 * block_q * d), "m": ((block_q,), 4 * block_q)})
            r.block(STORE, o_, (head, rows), line=("mine.py", 30))
            r.block(STORE, l_, (head, rows), line=("mine.py", 31))
    return KernelTrace(r.done(), problem=None if group == 1 else p, values=values)


def gradients(n=96, d=16, block=32, heads=2, group=1, causal=True, wrong=None):
    """Return the trace of a backward pass in three launches; `wrong` replaces values by name."""
    p = Problem(n, head_dim=d, heads=heads, kv_heads=heads // group, causal=causal)
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, heads, n, d)).astype(np.float32)
    k, v = rng.standard_normal((2, heads // group, n, d)).astype(np.float32)
    out, lse = oracle.attention(q[None], k[None], v[None], p)
    exact = oracle.gradients(q[None], k[None], v[None], do[None], p)
    values = {"q": q, "k": k, "v": v, "o": out[0], "lse": lse[0], "do": do}
    values |= {"delta": (out[0] * do).sum(-1)}
    values |= {name: exact[name][0] for name in ("dq", "dk", "dv")} | (wrong or {})
    values = {name: np.asarray(x, np.float32) for name, x in values.items()}
    r = Recorder("hand")
    t = codes_of(r, values)
    tiles = [slice(first, min(n, first + block)) for first in range(0, n, block)]

    def move(op, names, head, rows):
        for name in names.split():
            r.block(op, t[name], (head, rows))

    r.launch("delta", (len(tiles), heads), constants={"causal": causal})
    for head in range(heads):
        for i, rows in enumerate(tiles):
            r.program((i, head))
            move(LOAD, "o do", head, rows)
            move(STORE, "delta", head, rows)
    r.launch("dkdv", (len(tiles), heads // group))
    for key in range(heads // group):
        for j, cols in enumerate(tiles):
            r.program((j, key))
            move(LOAD, "k v", key, cols)
            for head in range(key * group, (key + 1) * group):
                for rows in tiles[j if causal else 0 :]:
                    move(LOAD, "q do lse delta", head, rows)
            move(STORE, "dk dv", key, cols)
    r.launch("dq", (len(tiles), heads))
    for head in range(heads):
        for i, rows in enumerate(tiles):
            r.program((i, head))
            move(LOAD, "q do lse delta", head, rows)
            for cols in tiles[: i + 1 if causal else None]:
                move(LOAD, "k v", head // group, cols)
            move(STORE, "dq", head, rows)
    return KernelTrace(r.done(), problem=p, values=list(values.values()))


def decoding(n=256, d=16, heads=2, splits=4, block=32):
    """Return the trace of split-KV decoding: partial results, and their merge."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((heads, d)).astype(np.float32)
    k, v = rng.standard_normal((2, heads, n, d)).astype(np.float32)
    p = Problem(1, n, head_dim=d, heads=heads)
    out, lse = oracle.attention(q[None, :, None], k[None], v[None], p)
    values = {"q": q, "k": k, "v": v, "o_part": np.zeros((splits, heads, d))}
    values |= {"l_part": np.zeros((splits, heads)), "o": out[0, :, 0], "lse": lse[0, :, 0]}
    values = {name: np.asarray(x, np.float32) for name, x in values.items()}
    r = Recorder("hand")
    t = codes_of(r, values)
    r.launch("split", (splits, heads))
    for head in range(heads):
        for split in range(splits):
            r.program((split, head))
            r.block(LOAD, t["q"], (slice(head, head + 1),))
            for first in range(split * n // splits, (split + 1) * n // splits, block):
                for name in "kv":
                    r.block(LOAD, t[name], (head, slice(first, first + block)))
            for name in ("o_part", "l_part"):
                r.block(STORE, t[name], (split, slice(head, head + 1)))
    r.launch("combine", (heads,))
    for head in range(heads):
        r.program((head,))
        for name in ("o_part", "l_part"):
            r.block(LOAD, t[name], (slice(0, splits), slice(head, head + 1)))
        for name in ("o", "lse"):
            r.block(STORE, t[name], (slice(head, head + 1),))
    return KernelTrace(r.done(), values=list(values.values()))
