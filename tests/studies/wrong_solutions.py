# ruff: noqa: E501 (what is found and put there are lines of code)
"""Wrong solutions: a reference with one thing changed, and what must be said of it.

``(exercise, kind, words, what to find, what to put there)``; of several places, the first, unless
`find` begins with "*" (all). `kind` is that of the first mark that is not full.
"""

#: Exercises of one forward pass whose references share these lines.
NO_SCALE = "                        S *= p.scale\n", ""
NO_MAX = "                        m[:] = m_new\n", ""

WRONG = [
    # -- counting by hand
    ("count-a-product", "answer", "counted elements; a float32 has 4", "2560", "640"),
    ("count-a-product", "answer", "there are 5 steps, which share", "15360", "3072"),
    ("count-a-product", "answer", "each step moves only its own rows", "7680", "38400"),
    ("count-a-product", "answer", "a multiply-add is two", "61440", "30720"),
    ("count-a-product", "answer", "5,120 is wrong: it is too large", "2560", "5120"),
    ("count-a-product", "answer", "must be an integer", "2560", "'2560'"),
    # -- softmax
    ("naive-softmax", "result", "not divided by the sum", "S /= S.sum(axis=1)[:, None]", "pass"),
    ("naive-softmax", "shape", "do not broadcast", "S.sum(axis=1)[:, None]", "S.sum(axis=1)"),
    ("naive-softmax", "result", "the sum runs along the queries, axis=0", "S.sum(axis=1)[:, None]", "S.sum(axis=0)"),
    ("stable-softmax", "result", "the maximum runs along the queries", "S.max(axis=1)[:, None]", "S.max(axis=0)"),
    ("stable-softmax", "result", "the sum runs along the queries", "S.sum(axis=1)[:, None]", "S.sum(axis=0)"),
    ("naive-softmax", "overflow", "holds", "np.exp(S, out=S)", "S = np.exp(S)"),
    ("naive-softmax", "bytes", "S was loaded 2 times; once is enough", "np.exp(S", "sram.free(S)\n                S = sram.load(hbm.S, rows)\n                np.exp(S"),
    ("naive-softmax", "off chip", "stay on chip", "S.sum(axis=1)[:, None]", "float(S.sum())"),
    ("naive-softmax", "outside", "from outside the machine", "S.sum(axis=1)[:, None]", "np.ones(48)"),
    ("stable-softmax", "result", "NaN or infinity for large scores", "S -= S.max(axis=1)[:, None]", "pass"),
    ("stable-softmax", "result", "not divided by the sum", "S /= S.sum(axis=1)[:, None]", "pass"),
    ("stable-softmax", "result", "", "S.max(axis=1)", "S.min(axis=1)"),
    ("stable-softmax", "unstored", "without storing all of P: rows 24 to 31", "machine.row_tiles()", "machine.row_tiles()[:-1]"),
    ("stable-softmax", "unloaded", "S lies in HBM", "S = sram.load(hbm.S, rows)", "S = hbm.S * 1"),
    ("online-softmax", "result", "check the rescaling", "l *= np.exp(m - m_new)", "pass"),
    ("online-softmax", "freed", "after its memory was freed", "m[:] = m_new", "m = m_new"),
    ("online-softmax", "bytes", "S was loaded 3 times; 2 times is enough", "                        m_new = np", "                        sram.free(S)\n                        S = sram.load(hbm.S, rows, cols)\n                        m_new = np"),
    ("online-softmax", "overflow", "S", "sram.load(hbm.S, rows, cols)", "sram.load(hbm.S, rows)[:, cols]"),
    ("online-softmax", "result", "", "S /= l[:, None]", "S /= S.sum(axis=1)[:, None]"),
    ("fused-softmax-product", "result", "not divided by l", "O /= l[:, None]", "pass"),
    ("fused-softmax-product", "result", "in every iteration; divide once, after the last", "                        m[:] = m_new\n                O /= l[:, None]", "                        m[:] = m_new\n                        O /= l[:, None]"),
    ("fused-softmax-product", "result", "check the rescaling", "O *= alpha[:, None]", "pass"),
    ("fused-softmax-product", "bytes", "V was loaded 8 times; 4 times is enough", "                        m[:] = m_new", "                        sram.load(hbm.V, cols)\n                        m[:] = m_new"),
    ("fused-softmax-product", "operation", "S is an input", "                        l *= alpha", "                        sram.store(hbm.S, rows, S, cols)\n                        l *= alpha"),
    # -- forward passes
    ("causal-skipping", "result", "without the causal mask", "if keep is not None:\n", "if False:\n"),
    ("causal-skipping", "bytes", "K was loaded 6 times; 3.5 times is enough", "continue", "pass"),
    ("causal-skipping", "result", "the scores lack the scale", *NO_SCALE),
    ("causal-skipping", "result", "NaN or infinity", "S[~keep]", "S[keep]"),
    ("flash1-forward", "unstored", "was never stored, so there are no numbers", "sram.store(hbm.l, rows, 0.0)", "pass"),
    ("flash1-forward", "result", "", "O *= l[:, None]", "pass"),
    ("flash1-forward", "result", "the scores lack the scale", *NO_SCALE),
    ("flash1-forward", "bytes", "K was loaded 5 times; once is enough", "rows) @ K.T", "rows) @ sram.load(hbm.K, cols).T"),
    ("flash1-forward", "shape", "past the end of a tile of 8", 'outer="keys"', 'outer="queries"'),
    ("flash2-forward", "result", "the scores lack the scale", *NO_SCALE),
    ("flash2-forward", "result", "not divided by l", "O /= l[:, None]", "pass"),
    ("flash2-forward", "result", "", *NO_MAX),
    ("flash2-forward", "result", "a part of K and V was never loaded", "in machine.key_tiles()", "in machine.key_tiles()[:-1]"),
    ("flash2-forward", "unstored", "without storing all of L: nothing", "sram.store(hbm.L", "(hbm.L"),
    ("flash2-forward", "result", "L, normal", "m + np.log(l)", "np.log(l)"),
    ("flash2-forward", "bytes", "Q was loaded 4 times; once is enough", "                        S = Q @", "                        Q = sram.load(hbm.Q, rows)\n                        S = Q @"),
    ("flash2-forward", "bytes", "O: moved more often than in the exercise's loop order, which costs", "                        m[:] = m_new", "                        sram.store(hbm.O, rows, O)\n                        m[:] = m_new"),
    ("flash2-forward", "overflow", "holds", "sram.load(hbm.K, cols).T", "sram.load(hbm.K, slice(0, 48))[cols].T"),
    ("flash2-forward", "result", "the scale is 1 / head_dim; it should be", "S *= p.scale", "S *= 1 / p.head_dim"),
    ("flash2-forward", "result", "log l has the wrong sign: L is m + log l, not m - log l; O is right", "m + np.log(l)", "m - np.log(l)"),
    ("flash2-forward", "result", "not -(m + log l); O is right", "m + np.log(l)", "-m - np.log(l)"),
    ("flash2-forward", "result", "L is in base 2: multiply it by log 2; O is right", "m + np.log(l)", "(m + np.log(l)) * 1.4426950408889634"),
    ("flash2-forward", "result", "L is log l; add m", "m + np.log(l)", "np.log(l)"),
    ("flash2-forward", "result", "L is m; add log l", "m + np.log(l)", "m"),
    ("flash2-forward", "result", "it should be m + log l", "m + np.log(l)", "m + l"),
    ("flash2-forward", "result", "in every iteration and again at the end", "                        m[:] = m_new", "                        O /= l[:, None]\n                        m[:] = m_new"),
    ("causal-skipping", "result", "take the sum of a tile of scores along the keys, axis=1", "S.sum(axis=1)", "S.sum(axis=0)"),
    ("decode-splits", "result", "L is in base 2", "sram.store(hbm.L, query, L)", "sram.store(hbm.L, query, L * 1.4426950408889634)"),
    # -- backward passes
    ("dk-dv", "result", "delta was not subtracted from dP", "dP -= sram.load(hbm.delta, rows)[:, None]", "pass"),
    ("dq", "result", "delta was not subtracted from dP", "dP -= delta[:, None]", "pass"),
    ("dq", "result", "the scale is 1 / head_dim; it should be", "P *= p.scale", "P *= 1 / p.head_dim"),
    ("delta", "result", "must not contain the scale", "O.sum(axis=1)", "O.sum(axis=1) * machine.problem.scale"),
    ("delta", "result", "not its mean", "O.sum(axis=1)", "O.mean(axis=1)"),
    ("delta", "shape", "but the tile has", "O.sum(axis=1)", "O.sum(axis=1)[:, None]"),
    ("delta", "overflow", "holds", "O *= sram", "O = O * sram"),
    ("dk-dv", "result", "dK must contain the scale exactly once", "dK *= p.scale", "pass"),
    ("dk-dv", "result", "dK, normal", "dP -= sram.load(hbm.delta, rows)[:, None]", "pass"),
    ("dk-dv", "result", "dV, normal", "P -= sram.load(hbm.L, rows)[:, None]\n                        np.exp(P, out=P)\n                        sram.accumulate(dV, P.T, dO)", "sram.accumulate(dV, P.T, dO)\n                        P -= sram.load(hbm.L, rows)[:, None]\n                        np.exp(P, out=P)"),
    ("dk-dv", "result", "a part of Q and dO was never loaded", "in machine.row_tiles()", "in machine.row_tiles()[1:]"),
    ("dk-dv", "bytes", "Q was loaded 6 times; 3 times is enough", "sram.accumulate(dK, P.T, Q)", "sram.accumulate(dK, P.T, sram.load(hbm.Q, rows))"),
    ("dq", "result", "dQ must contain the scale exactly once", "dQ *= p.scale", "pass"),
    ("dq", "bytes", "K was loaded 8 times; 4 times is enough", "sram.accumulate(dQ, P, K)", "sram.accumulate(dQ, P, sram.load(hbm.K, cols))"),
    ("dq", "scope", "a step (sram.step) cannot contain another step", "with sram.visit(rows, cols):", "with sram.step(rows):"),
    # -- many heads, many blocks
    ("grouped-queries", "bytes", "K was loaded 10 times; 2 times is enough", "                                S = Q @", "                                K, V = sram.load(hbm.K, cols), sram.load(hbm.V, cols)\n                                S = Q @"),
    ("grouped-queries", "machine", "whose Q you mean", "rows, member=g)\n                    O", "rows)\n                    O"),
    ("grouped-queries", "result", "", "sram.store(hbm.O, rows, O, member=g)", "sram.store(hbm.O, rows, O, member=0)\n                    sram.store(hbm.O, rows, O, member=g)"),
    ("decode-splits", "demand", "a quarter is 1,152 B", "        for at, cols in enumerate(parts):\n            with sram.step(query), sram.visit", "        with sram.step(query):\n          for at, cols in enumerate(parts):\n            with sram.visit"),
    ("decode-splits", "result", "", "weights = np.exp(L_s - L)", "weights = np.exp(L_s - L) * 0 + 0.25"),
    ("decode-splits", "result", "", "O /= l[:, None]", "pass"),
    ("fewest-bytes", "bytes", "K was loaded 24 times; 12 times is enough", "*16", "8"),
    ("fewest-bytes", "overflow", "holds", "*16", "24"),
]  # fmt: skip


def seeded(source: str, find: str, put: str) -> str:
    """`source` with the change."""
    if find.startswith("*"):
        assert find[1:] in source, find
        return source.replace(find[1:], put)
    assert find in source, find
    return source.replace(find, put, 1)
