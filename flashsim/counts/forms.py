"""The closed forms: requested bytes of each stage of each algorithm.

Every term states a fact about an algorithm: ``load K: heads * row_cols * d * e`` says that a
Q-outer loop reads K once per visit.
"""

from flashsim.problem.problem import Problem
from flashsim.schedule.schedule import Schedule

#: Bytes by operation and tensor.
Moved = dict[tuple[str, str], int]


def loads(**sizes: int) -> Moved:
    """Return the loads of tensors, given their bytes by name."""
    return {("load", name): nbytes for name, nbytes in sizes.items()}


def stores(**sizes: int) -> Moved:
    """Return the stores of tensors, given their bytes by name."""
    return {("store", name): nbytes for name, nbytes in sizes.items()}


class Forms:
    """Computes the requested bytes of each stage of a problem.

    `e`, `r` and `a` are the bytes per element in HBM of q, k and v, of a result, and of an
    accumulator.
    """

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.e, self.r, self.a = p.itemsize, p.result_itemsize, p.compute_itemsize
        self.heads, self.kv_heads = p.batch * p.heads, p.batch * p.kv_heads
        self.lead = p.bias[0] * p.bias[1] if p.bias else 0
        # A float32 or float64 problem has no separate accumulators in HBM.
        self.acc = "" if self.e == self.a else "_acc"

    # -- bytes of whole tensors, over all heads --------------------------------------------------

    def q(self, item: int) -> int:
        """Return the bytes of a tensor shaped like Q, with `item` bytes per element."""
        return self.heads * self.p.n_q * self.p.head_dim * item

    def o(self, item: int) -> int:
        """Return the bytes of a tensor shaped like out, with `item` bytes per element."""
        return self.heads * self.p.n_q * self.p.head_dim_v * item

    def k(self, item: int) -> int:
        """Return the bytes of a tensor shaped like K, with `item` bytes per element."""
        return self.kv_heads * self.p.n_kv * self.p.head_dim * item

    def v(self, item: int) -> int:
        """Return the bytes of a tensor shaped like V, or 0 if V is stored as columns of K."""
        return 0 if self.p.latent else self.kv_heads * self.p.n_kv * self.p.head_dim_v * item

    def stat(self) -> int:
        """Return the bytes of a tensor with one number per row, such as LSE, delta, l or m."""
        return self.heads * self.p.n_q * self.a

    def matrix(self, item: int) -> int:
        """Return the bytes of all (n_q, n_kv) matrices of the bias, or of the bias's gradient."""
        return self.lead * self.p.n_q * self.p.n_kv * item

    def scales(self, loaded: set[str], outer: str, s: Schedule, owners: int) -> dict[str, int]:
        """Return the bytes of the FP8 scales that are loaded with tiles of Q, K and V.

        Each tile load also loads one 4-byte scale per scale block that the tile overlaps. An
        outer-loop tile is loaded `owners` times: once per head or per head group. An inner-loop
        tile is loaded at every visit (tile pair).
        """
        if self.p.scales is None:
            return {}
        blocks = self.p.scales if isinstance(self.p.scales, tuple) else (self.p.n_q, self.p.n_kv)
        in_rows, in_cols = (
            -(-table[:, 1].astype(int) // every) - table[:, 0] // every
            for table, every in zip((s.rows, s.cols), blocks, strict=True)
        )
        if outer == "queries":
            q, kv = self.heads * int(in_rows.sum()), self.heads * s.over_visits(in_cols)
        else:
            q = self.heads * int((in_rows * s.visit_counts).sum())
            kv = owners * int(in_cols.sum())
        each = {"Q": q, "K": kv, "V": kv}
        return {f"{name}_scale": 4 * each[name] for name in each if name in loaded}

    def functions(self, algorithm: str, stage: str, outer: str, s: Schedule) -> Moved:
        """Return the bytes that score and mask functions read, or add to gradients, in one stage.

        Every visit reads the score function's captured elements; a visit of a MASKED tile also
        reads the mask function's. Elements that depend only on the row or the head are read once
        per row tile in a Q-outer loop.
        """
        p, h = self.p, self.heads
        moved: Moved = {}
        if stage == "delta" and p.sinks:
            step = h * s.t_r * self.a
            return loads(sink=step, L=self.stat()) | {("reduce", "dSink"): step}
        scored = ("forward", "dkdv", "dq", "fused", "backward")
        if stage not in (("scores",) if algorithm == "standard" else scored):
            return {}
        if stage == "forward" and p.sinks:
            moved["load", "sink"] = h * s.t_r * self.a
        for name, graph in (("F", p.score_mod), ("M", p.mask_graph)):
            if graph is None or not graph.loads:
                continue
            of, sums = graph.widths, s.sums if name == "F" else s.masked_sums
            moved["load", name] = h * (of["col"] * sums.row_cols + of["score"] * sums.area)
            own = h * (of["row"] * self.p.n_q + of["fixed"] * s.t_r)
            if outer == "keys":
                own = h * (of["row"] * sums.col_rows + of["fixed"] * sums.visits)
                moved["load", name] += own
            else:
                moved["load", f"{name}_own"] = own
        if stage in ("dq", "fused", "backward") and p.score_grads:
            reads = [p.score_mod.nodes[n] for n in p.score_mod.loads]
            added = sum(p.score_mod.arrays[x.value].name in p.score_grads for x in reads)
            moved["reduce", "dF"] = h * s.sums.area * added * self.a
        return moved

    # -- stages ---------------------------------------------------------------------------------

    def forward(self, algorithm: str, stage: str, s: Schedule) -> Moved:
        """Return the bytes of a forward stage under schedule `s`, as ``{(op, tensor): bytes}``."""
        h, e, r, a, sums = self.heads, self.e, self.r, self.a, s.sums
        d, dv = self.p.head_dim, self.p.head_dim_v
        walks = h // s.members
        scores, keys = walks * sums.area * r, walks * sums.row_cols * d * e
        values = walks * sums.row_cols * dv * e
        bias = loads(bias=scores) if self.lead else {}
        if stage == "scores":
            gate = stores(gate=scores) if self.p.softcap else {}
            return loads(Q=self.q(e), K=keys) | bias | stores(S=scores) | gate
        if stage == "softmax":
            return loads(S=scores) | stores(P=scores)
        if stage == "output":
            return loads(P=scores, V=values) | stores(O=self.o(r))
        o_acc = "O" + self.acc
        if stage == "init":
            return stores(**{o_acc: self.o(a)}, l=self.stat(), m=self.stat())
        if stage == "convert":
            return loads(O_acc=self.o(a)) | stores(O=self.o(r))
        if stage in ("split", "combine"):
            return self._decode(stage, s, walks)
        if algorithm == "flash1":
            rows, cols = h * sums.col_rows, h * self.p.n_kv
            inputs = {"K": cols * d * e, "V": cols * dv * e, "Q": rows * d * e}
            state = {o_acc: rows * dv * a, "l": rows * a, "m": rows * a}
            return loads(**inputs, **state) | stores(**state) | bias
        results = stores(O=self.o(r), L=self.stat())
        return loads(Q=self.q(e), K=keys, V=values) | bias | results

    def _decode(self, stage: str, s: Schedule, walks: int) -> Moved:
        """Return the bytes of a stage of FlashDecoding, as ``{(op, tensor): bytes}``.

        Q is loaded once for each part of a row tile's keys. With several parts, the first stage
        stores a partial O and L per part in HBM, and the combining stage loads them.
        """
        e, r, a, d, dv = self.e, self.r, self.a, self.p.head_dim, self.p.head_dim_v
        parts = walks * s.part_sums.part_rows
        partial = {"O_part": parts * dv * a, "L_part": parts * a}
        if stage == "combine":
            done = walks * (s.n_rows - s.part_sums.whole_rows)
            return loads(**partial) | stores(O=done * dv * r, L=done * a)
        whole, keys = walks * s.part_sums.whole_rows, walks * s.sums.row_cols
        pages = walks * s.page_reads * 4
        moved = loads(Q=(whole + parts) * d * e, table=pages, K=keys * d * e)
        moved |= {} if self.p.latent else loads(V=keys * dv * e)
        moved |= loads(bias=walks * s.sums.area * r) if self.lead else {}
        return moved | stores(O=whole * dv * r, L=whole * a, **partial)

    def backward(self, algorithm: str, stage: str, s: Schedule) -> Moved:
        """Return the bytes of a backward stage under schedule `s`, as ``{(op, tensor): bytes}``."""
        h, e, r, a, sums = self.heads, self.e, self.r, self.a, s.sums
        d, dv = self.p.head_dim, self.p.head_dim_v
        dq_acc, dbias_acc = "dQ" + self.acc, "dBias" + self.acc
        scores, rows, cols = h * sums.area * r, h * sums.col_rows, h * sums.row_cols
        bias = loads(bias=scores) if self.lead else {}
        dbias = {("reduce", dbias_acc): h * sums.area * a} if self.lead else {}
        dlse = loads(dL=self.stat()) if self.p.dlse else {}
        if stage == "clear_dbias":
            return {("store", dbias_acc): self.matrix(a)}
        if stage == "convert_dbias":
            return loads(dBias_acc=self.matrix(a)) | stores(dBias=self.matrix(r))
        if stage == "init":
            return {("store", dq_acc): self.q(a)}
        if stage == "convert":
            return loads(dQ_acc=self.q(a)) | stores(dQ=self.q(r))
        if stage == "delta":
            clear = {("store", dq_acc): self.q(a)} if algorithm == "flash2-fused" else {}
            return loads(O=self.o(r), dO=self.o(r)) | dlse | stores(delta=self.stat()) | clear
        if algorithm == "standard":
            return self._standard_backward(stage, scores, rows, cols, dbias | dlse)
        stats = loads(L=rows * a, delta=rows * a)
        if stage == "dq":
            own = loads(Q=self.q(e), dO=self.o(r), L=self.stat(), delta=self.stat())
            each = loads(K=cols * d * e, V=cols * dv * e)
            return own | each | bias | dbias | stores(dQ=self.q(r))
        shared = loads(K=self.k(e), V=self.v(e), Q=rows * d * e, dO=rows * dv * r) | bias
        shared |= stores(dK=self.k(r), dV=self.v(r))
        if stage == "dkdv":
            return shared | stats
        if algorithm == "flash2-once":  # each row tile has one visit
            return shared | dbias | dlse | loads(L=self.stat()) | stores(dQ=self.q(r))
        if stage == "fused":
            return shared | stats | dbias | {("reduce", dq_acc): rows * d * a}
        moved = shared | dbias | loads(O=rows * dv * r)  # FlashAttention-1
        moved |= loads(dL=rows * a) if self.p.dlse else {}
        dq = {dq_acc: rows * d * a}
        return moved | loads(l=rows * a, m=rows * a, **dq) | stores(**dq)

    def _standard_backward(
        self, stage: str, scores: int, rows: int, cols: int, of_ds: Moved
    ) -> Moved:
        e, r, d, dv = self.e, self.r, self.p.head_dim, self.p.head_dim_v
        if stage == "dv":
            return loads(P=scores, dO=rows * dv * r) | stores(dV=self.v(r))
        if stage == "dp":
            return loads(dO=self.o(r), V=cols * dv * e) | stores(dP=scores)
        if stage == "ds":
            gate = loads(gate=scores) if self.p.softcap else {}
            return gate | loads(P=scores, dP=scores) | stores(dS=scores) | of_ds
        if stage == "dq":
            return loads(dS=scores, K=cols * d * e) | stores(dQ=self.q(r))
        return loads(dS=scores, Q=rows * d * e) | stores(dK=self.k(r))
