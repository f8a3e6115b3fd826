"""Classic bugs of GPU kernels, each one a replaced fragment of the CUDA C++.

``python -m pytest --fault NAME tests/gpu/test_hopper.py`` seeds one; the tests should fail.
Only bugs that end are here: a wait that never comes true would hang the GPU instead. Nor are those
that nobody can see, such as K not awaited where Q, which the copy engine brings after it, is; nor
those that show by luck only: the portable kernels' first tiles, not awaited, may have arrived by
the time that all copies are under way; test_emulated.py has that one: nothing is early there.
"""

from faults import Fault

HOPPER_FORWARD = "hopper/forward.cu"
BACKWARD, WIDE, DQ = "hopper/backward.cu", "hopper/backward_wide.cu", "hopper/dq.cu"
ROLES = "hopper/backward_roles.cu"
SHARED, WORK = "hopper/kv_outer.cuh", "hopper/tile_scheduler.cuh"
FORWARD, DKDV, PORTABLE_DQ = (
    "portable/forward.cu",
    "portable/backward_dkdv.cu",
    "portable/backward_dq.cu",
)
FORWARD_F32, ROWS = "portable/forward_f32.cu", "portable/backward_rows.cu"
FP8, QUANTIZE = "hopper/forward_fp8.cu", "hopper/quantize.cu"


def _tests(file):
    """Those of a file whose names fit pytest's -k, without the kernels in Python."""
    return lambda words: (file, "-k", f"({words}) and not python")


hopper, fp8, values, counts, packed = (
    _tests(f"gpu/test_{name}.py")
    for name in ("hopper", "fp8", "cupy", "cupy_traces", "packed_heads")
)

FAULTS = {
    # -- Hopper's backward in one visit -----------------------------------------------------------
    "once-delta-of-half-the-keys": Fault(
        "delta is summed over one warpgroup's keys",
        *(BACKWARD, "w < 4 * WARPGROUPS; ++w) sum", "w < 4; ++w) sum"),
        hopper("test_where_row_tiles_have_one_visit and packed"),
    ),
    "once-scale-left-out": Fault(
        "dQ is stored without the scores' scale",
        BACKWARD,
        "stage_rounded(s.dq[g][0], dQ, scale);",
        "stage_rounded(s.dq[g][0], dQ, 1.0f);",
        hopper("test_where_row_tiles_have_one_visit and packed"),
    ),
    "once-staged-without-swizzle": Fault(
        "rows of dQ are laid down as if their pieces were not permuted",
        *(BACKWARD, "(piece ^ lane % 8) * 16;", "piece * 16;"),
        hopper("test_where_row_tiles_have_one_visit and packed"),
    ),
    # -- FP8 --------------------------------------------------------------------------------------
    "fp8-scale-left-out": Fault(
        "scores are not multiplied by K's scale",
        *(FP8, "softmax(S, alpha, to_log2 * scales.x);", "softmax(S, alpha, to_log2);"),
        fp8("test_shapes and causal and 128"),
    ),
    "fp8-scale-of-the-visit-before": Fault(
        "O is not brought from one block of V's scale to the next",
        *(FP8, "alpha[0] *= ratio, alpha[1] *= ratio;", "", fp8("test_shapes and causal and 128")),
    ),
    "fp8-flush-skipped": Fault(
        "one accumulator takes the products of all visits",
        FP8,
        "    constexpr int SLICES = DV / SLICE;\n",
        """    constexpr int SLICES = DV / SLICE;
#if FS_DV <= 128
    for (int e = 0; e < DV / 2; ++e) O[e] *= alpha[e / 2 % 2];
    wgmma_fence();
    for (int x = 0; x < BLOCK_K / 32; ++x)
        wgmma_pv(O, P[x], descriptor(v, 0) + along_row(x, DV), 1);
    wgmma_commit();
    wgmma_wait<0>();
    pin(O);
    if (true) return;
#endif
""",
        fp8("test_sums_over_many_keys and 128"),
    ),
    "fp8-v-in-its-order": Fault(
        "V is transposed, but the keys of a sixteen stay in their order",
        *(QUANTIZE, "first + key_at(four, j);", "first + 4 * four + j;"),
        fp8("test_shapes and ragged and 64"),
    ),
    "fp8-quantised-v-in-its-order": Fault(
        "the same of the quantiser",
        QUANTIZE,
        "return key_at(own_four(piece), piece % 4);",
        "return 4 * own_four(piece) + piece % 4;",
        fp8("test_the_quantisers_v"),
    ),
    "fp8-q-alone-rotated": Fault(
        "K is not rotated",
        *(QUANTIZE, "turned = ROTATE && !of_v;", "turned = ROTATE && t.which == OF_Q;"),
        fp8("test_fa3s_outliers"),
    ),
    # -- Hopper's forward -------------------------------------------------------------------------
    "q-not-awaited": Fault(
        "scores are computed before the copy engine has brought Q",
        *(
            HOPPER_FORWARD,
            "wait(&s.q_full[g], q_parity);",
            "",
            hopper("test_features and ragged and 128"),
        ),
    ),
    "k-not-awaited": Fault(
        "the second visit's scores are computed before its K has arrived",
        *(
            HOPPER_FORWARD,
            "if (last > begin) {",
            "if (false) {",
            hopper("test_features and many and 256"),
        ),
    ),
    "v-not-awaited": Fault(
        "but for the last one, a visit's output is computed before its V has arrived",
        HOPPER_FORWARD,
        """wait(&s.v_full[ring_v.stage], ring_v.parity);
                issue_output(""",
        "issue_output(",
        hopper("test_features and many and 256"),
    ),
    "v-overwritten": Fault(
        "every tile of V is copied over the last one, into the first stage",
        *(HOPPER_FORWARD, "copy_tile(s.v[ring_v.stage], map_v,", "copy_tile(s.v[0], map_v,"),
        hopper("test_features and ragged and 64"),
    ),
    "cuda-o-not-rescaled": Fault(
        "O keeps the scale of an older maximum",
        *(HOPPER_FORWARD, "O[e] *= alpha[e / 2 % 2];", ";", hopper("test_kinds and rising and 64")),
    ),
    "hopper-largest-as-integers": Fault(
        "of scores that are all below 0 the smallest is taken for the largest",
        *(HOPPER_FORWARD, "if (__builtin_expect(below, false)) {", "if (false) {"),
        hopper("test_kinds and below and 64"),
    ),
    "cuda-lse-without-log": Fault(
        "LSE is the maximum",
        *(HOPPER_FORWARD, " + __logf(l);", ";", hopper("test_features and ragged and 64")),
    ),
    "forward-mask-off-by-one": Fault(
        "the diagonal itself is masked",
        *(
            HOPPER_FORWARD,
            "(c > last ||",
            "(c >= last ||",
            hopper("test_features and causal and 64"),
        ),
    ),
    "masks-start-at-0": Fault(
        "the keys of every packed sequence are masked as the first one's",
        HOPPER_FORWARD,
        "const int key = it.base + visit.tile * 2 * N",
        "const int key = visit.tile * 2 * N",
        hopper("test_features and varlen and 64"),
    ),
    "wrong-key-head": Fault(
        "query heads take key heads in turn, not in groups",
        *(HOPPER_FORWARD, "head : head / a.group,", "head : head % (a.heads / a.group),"),
        hopper("test_features and causal and 64"),
    ),
    "packed-heads-all-the-first": Fault(
        "all rows of a query are stored as those of the group's first head",
        HOPPER_FORWARD,
        "head = walk_head * FS_PACK + member_of(row);",
        "head = walk_head * FS_PACK;",
        packed("test_results and more and 64"),
    ),
    "packed-rows-as-queries-in-the-mask": Fault(
        "the mask takes the number of a packed row for that of its query",
        *(HOPPER_FORWARD, "query_of(row + 8 * r)", "row + 8 * r"),
        packed("test_results and more and 64"),
    ),
    "ragged-keys-counted": Fault(
        "keys past the end count as loaded",
        *(
            HOPPER_FORWARD,
            "min(BLOCK_K, it.end - key) * FS_COUNTED * 2",
            "BLOCK_K * FS_COUNTED * 2",
        ),
        hopper("counts and ragged and 96 and ascending"),
    ),
    "v-counted-at-once": Fault(
        "all of a row's V counts as loaded in its first visit",
        HOPPER_FORWARD,
        "report_one(a.visit_counts + (first + v - 1) * 8 + 1,",
        "report_one(a.visit_counts + first * 8 + 1,",
        hopper("counts and ragged and 96 and ascending"),
    ),
    # -- what all of Hopper's kernels share -------------------------------------------------------
    "counter-not-reset": Fault(
        "a launch leaves the work counter where it ended, and the next one begins there",
        *(WORK, "atomicInc(counter, items - 1)", "atomicAdd(counter, 1)", hopper("side_by_side")),
    ),
    "view-of-the-next-row": Fault(
        "boxes of a packed sequence are asked of the view that ends a row later",
        *(WORK, "Place{ROUND - stop + row, stop}", "Place{ROUND - stop + row, stop + 1}"),
        hopper("test_features and varlen and 64"),
    ),
    # -- Hopper's backward: order, who may read what and when -------------------------------------
    "tiles-not-awaited": Fault(
        "products start before the copy engine has brought Q and dO",
        *(
            BACKWARD,
            "wait(&s.full[stage], ring.parity);",
            "",
            hopper("test_features and 128 and (many or more)"),
        ),
    ),
    "keys-not-awaited": Fault(
        "products start before the copy engine has brought K and V",
        *(BACKWARD, "wait(&s.kv_full, kv_parity);", "", hopper("test_features and many and 128")),
    ),
    "keys-overwritten": Fault(
        # Behind V's wait the copy mostly comes when K is no longer read: so it goes before.
        "the next item's K, which nothing waits for, is copied over the one that is still read",
        SHARED,
        """                if (FS_CLUSTER == 1) wait(&s.v_empty, kv_parity ^ 1);
                arrive_expect(&s.kv_full, sizeof(s.k) + sizeof(s.v));
                const Place own = place(it.own.start, it.own.stop, batch);
                copy_own_tile(s.v, map_v, &s.kv_full, own, kv_head);
                if (FS_CLUSTER == 1) wait(&s.k_empty, kv_parity ^ 1);
                copy_own_tile(s.k, map_k, &s.kv_full, own, kv_head);
""",
        """                arrive_expect(&s.kv_full, sizeof(s.k) + sizeof(s.v));
                const Place own = place(it.own.start, it.own.stop, batch);
                copy_own_tile(s.k, map_k, &s.kv_full, own, kv_head);
                if (FS_CLUSTER == 1) wait(&s.v_empty, kv_parity ^ 1);
                copy_own_tile(s.v, map_v, &s.kv_full, own, kv_head);
""",
        hopper("test_features and many and 128"),
    ),
    "ds-not-awaited": Fault(
        "dQ starts before the other warpgroup has written its dS",
        *(
            BACKWARD,
            "named_sync(DS_READY, 128 * WARPGROUPS);",
            "",
            hopper("test_features and ragged"),
        ),
    ),
    "deferred-ds-not-awaited": Fault(
        "dQ of the last visit starts though the other warpgroup may not have written its dS",
        *(BACKWARD, "if (due) wait(&s.ds_full[of], stage ? ring.parity : ring.parity ^ 1);", ""),
        hopper("several_cluster_sizes and problem0 and True"),
    ),
    "wide-scores-not-awaited": Fault(
        "dV starts before the other warpgroup has written its P",
        *(WIDE, "named_sync(SCORES_READY, 128 * WARPGROUPS);", ""),
        hopper("test_features and ragged and 256"),
    ),
    "out-of-turn": Fault(
        "dQ is added in whatever order blocks come",
        *(BACKWARD, "wait_turn(turn, a.ranks[a.ptr[it.outer] + step.v]);", ""),
        hopper("two_hundred and 1024 and 128"),
    ),
    # -- Hopper's backward: masks and bounds ------------------------------------------------------
    "mask-skipped": Fault(
        "masked tiles are treated as full ones",
        *(SHARED, "if (!masked) return;\n#pragma unroll", "return;\n#pragma unroll"),
        hopper("test_features and causal and 64"),
    ),
    "mask-off-by-one": Fault(
        "the diagonal itself is masked",
        *(SHARED, "(c < first ||", "(c <= first ||", hopper("test_features and causal and 64")),
    ),
    "dq-mask-off-by-one": Fault(
        "the diagonal itself is masked in dQ's own pass",
        *(DQ, "(c > last ||", "(c >= last ||", hopper("test_features and causal and 64")),
    ),
    "sequences-start-at-0": Fault(
        "the rows of every packed sequence are read from the first one's tiles",
        *(SHARED, "const int query = it.base + it", "const int query = it"),
        hopper("test_features and varlen"),
    ),
    # -- Hopper's backward: arithmetic ------------------------------------------------------------
    "cuda-delta-left-out": Fault(
        "dS = P dP",
        *(SHARED, ": lse[i] * unit, -delta[i],", ": lse[i] * unit, 0.0f,"),
        hopper("test_features and ragged and 128"),
    ),
    "lse-in-base-e": Fault(
        "the log-sum-exp is not taken to base 2",
        *(SHARED, ": -LOG2E;", ": -1.0f;", hopper("test_features and (softcap or ragged) and 256")),
    ),
    "dk-not-scaled": Fault(
        "dK misses the scale",
        *(BACKWARD, "row, dK, r, a.scale, exists)", "row, dK, r, 1.0f, exists)"),
        hopper("test_features and many and 128"),
    ),
    "wrong-query-head": Fault(
        "every query head of a group is taken for the first",
        *(SHARED, "kv_head * a.group + step.member;", "kv_head * a.group;"),
        hopper("test_features and causal and 128"),
    ),
    "half-of-dq": Fault(
        "the second half of the keys is left out of dQ",
        *(DQ, "dQ[c + e] += s.partial[e][threadIdx.x % 128];", ";"),
        hopper("test_features and ragged and 128"),
    ),
    "dq-columns-swapped": Fault(
        "both warpgroups add their columns of dQ to the first ones",
        *(BACKWARD, "return (SPLIT_COLUMNS ? 64 * g : 0) +", "return"),
        hopper("test_features and ragged and 128"),
    ),
    "columns-left-out": Fault(
        "columns beyond the last whole sixteen are not multiplied",
        *(WORK, "+ step - 1) / step", ") / step", hopper("test_head_dims and bfloat16")),
    ),
    "wide-staging-not-swizzled": Fault(
        "dQ of 192 columns is staged without the copy engine's swizzle",
        *(WIDE, "^ (row % 8) ^ (odd", "^ (odd", hopper("test_head_dims and bfloat16")),
    ),
    "staging-not-swizzled": Fault(
        "dQ is staged without the copy engine's swizzle",
        *(
            BACKWARD,
            "(dq_piece ^ dq_row) * 16",
            "dq_piece * 16",
            hopper("test_features and ragged and 64"),
        ),
    ),
    "narrow-columns-shared": Fault(
        "both warpgroups multiply the same half of the middle chunk",
        *(WIDE, "return 64 + 32 * g;", "return 64;", hopper("test_head_dims and bfloat16")),
    ),
    # -- Hopper's backward by roles; test_emulated_hopper.py sees these on a CPU ------------------
    "roles-delta-of-another-row": Fault(
        "every second row of dS takes the row before's delta",
        *(ROLES, "+ delta[i / 2 % 2]);", "+ delta[0]);", hopper("by_roles and ragged")),
    ),
    "roles-mask-off-by-one": Fault(
        "the diagonal itself is masked",
        *(ROLES, "(c > last ||", "(c >= last ||", hopper("by_roles and causal")),
    ),
    "roles-p-not-swizzled": Fault(
        "P and dS are stored without the swizzle of a right operand",
        *(ROLES, "^ key % 8) * 8", ") * 8", hopper("by_roles and ragged")),
    ),
    "roles-dq-of-other-columns": Fault(
        "dQ is that of the columns 64 further on",
        *(ROLES, "issue_dq(dQ, s.ds, s.k[0]);", "issue_dq(dQ, s.ds, s.k[1]);"),
        hopper("by_roles and ragged"),
    ),
    "roles-halves-of-a-sum-swapped": Fault(
        "of sixteen keys of dK and dV the second eight are stored first",
        *(ROLES, "lane / 2 % 2 * 8 + lane / 4;", "(1 - lane / 2 % 2) * 8 + lane / 4;"),
        hopper("by_roles and ragged"),
    ),
    "roles-dk-not-scaled": Fault(
        "dK misses the scale",
        *(ROLES, "kv_heads, sum, a.scale)", "kv_heads, sum, 1.0f)"),
        hopper("by_roles and ragged"),
    ),
    # -- Hopper's backward: clusters --------------------------------------------------------------
    "others-left-out": Fault(
        "a block of a cluster adds up its own dK and dV only",
        *(BACKWARD, "block < FS_CLUSTER; ++block", "block < 1; ++block"),
        hopper("test_every_cluster and causal and 128"),
    ),
    "steps-taken-twice": Fault(
        "a block of a cluster also takes what those after it take",
        *(SHARED, "return steps * (cluster_rank() + 1) / FS_CLUSTER - first;"),
        *("return steps - first;", hopper("test_every_cluster and causal and 64")),
    ),
    "shares-from-the-start": Fault(
        "every block of a cluster begins with the item's first visit",
        *(SHARED, "if (steps) member = first / visits, v = first % visits;", ""),
        hopper("test_every_cluster and causal and 64"),
    ),
    "keys-counted-by-all": Fault(
        "every block of a cluster counts K and V as loaded",
        *(SHARED, "cluster_rank() ? 0 : it.own.stop", "it.own.stop"),
        hopper("test_every_cluster and causal and 64"),
    ),
    "items-taken-twice": Fault(
        "the launch behind clusters begins with their items, not with the others",
        *(
            SHARED,
            "w = a.first + first_work();",
            "w = first_work();",
            hopper("several_cluster_sizes and True"),
        ),
    ),
    # -- Hopper's backward: grouped heads in step -------------------------------------------------
    "never-back": Fault(
        "items that begin at the last row tile go on from there",
        *(SHARED, "member = 0, v += it.way;", "member = 0, v += 1;"),
        hopper("in_step and causal and 128"),
    ),
    # -- Hopper's backward: counts ----------------------------------------------------------------
    "ragged-rows-counted": Fault(
        "rows past the end count as loaded",
        *(SHARED, "const int rows = min(BLOCK_Q, it.end - query);", "const int rows = BLOCK_Q;"),
        hopper("counts and ragged and 96 and ascending"),
    ),
    # -- "flash2-fused-first"; test_emulated_hopper.py sees these on a CPU ------------------------
    "first-visit-adds": Fault(
        "the first visit adds its part of dQ to whatever memory holds",
        *(SHARED, "atomicCAS(piece, 0, 1) == 0) return true;"),
        *("atomicCAS(piece, 0, 2) == 0) return false;", hopper("test_features and causal and 64")),
    ),
    "first-rows-without-visits": Fault(
        "dQ of rows without keys is whatever memory holds",
        *(ROWS, "* 2] != 2;  // no visit", "* 2] == 3;  // no visit"),
        hopper("test_scratch_memory and 64"),
    ),
    # -- the portable kernels; test_emulated.py sees these on a CPU --------------------------------
    "portable-o-not-rescaled": Fault(
        "O keeps the scale of an older maximum",
        *(FORWARD, "o[i][c][x] *= alpha[x / 2];", ";", values("test_kinds and bfloat16-rising")),
    ),
    "portable-o-not-normalised": Fault(
        "O is stored without the division by l",
        *(
            FORWARD,
            "sum == 0.0f ? 0.0f : 1.0f / sum;",
            "1.0f;",
            values("test_features and gqa-float16"),
        ),
    ),
    "portable-mask-off-by-one": Fault(
        "the diagonal itself is masked",
        *(
            FORWARD,
            "lane % 4 * 2 + x))",
            "lane % 4 * 2 + x + 1))",
            values("test_features and gqa-float16"),
        ),
    ),
    "portable-v-counted-at-once": Fault(
        "all of a row's V counts as loaded in its first visit",
        FORWARD,
        "report(visit_count + n * 8, k_bytes, v_bytes);",
        "report(visit_count + n * 8, k_bytes, 0), report(visit_count, 0, v_bytes);",
        counts("bfloat16-sides0-gqa-ascending"),
    ),
    "portable-f32-o-not-rescaled": Fault(
        "O keeps the scale of an older maximum",
        *(FORWARD_F32, "o[r][x] *= alpha;", ";", values("test_kinds and float32-rising")),
    ),
    "portable-delta-left-out": Fault(
        "dS = P dP",
        DKDV,
        f"#else\n{24 * ' '}ds[i][c][x] = p[i][c][x] * (ds[i][c][x] - (x % 2 ? delta.y : delta.x));",
        f"#else\n{24 * ' '}ds[i][c][x] = p[i][c][x] * ds[i][c][x];",
        values("test_features and gqa-float16"),
    ),
    "portable-rows-of-a-batch-in-one": Fault(
        "delta's rows that a thread loads together are added up in the first of them",
        *(ROWS, "sum[j] += dot(x[j], y[j]);", "sum[0] += dot(x[j], y[j]);"),
        values("test_features and gqa-float16"),
    ),
    "portable-half-of-dq-rounded-twice": Fault(
        "of eight numbers of dQ the first four are rounded twice, the others not",
        *(ROWS, "y[j] = acc[2 * e + 1];", "y[j] = acc[2 * e];"),
        values("test_features and gqa-float16"),
    ),
    "portable-dk-not-scaled": Fault(
        "dK misses the scale",
        *(DKDV, "dk[i], a.scale, a.scale);", "dk[i], 1.0f, 1.0f);"),
        values("test_features and gqa-float16"),
    ),
    "portable-wrong-query-head": Fault(
        "every query head of a group is taken for the first",
        *(DKDV, "head = kv_head * a.group + member;", "head = kv_head * a.group;"),
        values("test_features and gqa-float16"),
    ),
    "portable-dq-mask-off-by-one": Fault(
        "the diagonal itself is masked in dQ's own pass",
        *(PORTABLE_DQ, "lane % 4 * 2 + x))", "lane % 4 * 2 + x + 1))"),
        values("test_features and gqa-float16"),
    ),
}
