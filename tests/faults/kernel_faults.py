"""Classic bugs of GPU kernels, each one a replaced fragment of the CUDA C++.

``python -m pytest --fault NAME tests/gpu/test_hopper.py`` seeds one; the tests should fail.
Only bugs that end are here: a wait that never comes true would hang the GPU instead. Nor are those
that nobody can see, such as K not awaited where Q, which the copy engine brings after it, is; nor
those that show by luck only: the portable kernels' first tiles, not awaited, may have arrived by
the time that all copies are under way; test_emulated.py has that one: nothing is early there. And
dQ of rows without keys may find zeros in memory; test_emulated_hopper.py has that one.
"""

from faults import table

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

FAULTS = table(
    r"""
# -- Hopper's backward in one visit
once-delta-of-half-the-keys: BACKWARD, hopper("test_where_row_tiles_have_one_visit and packed")
    delta is summed over one warpgroup's keys
- w < 4 * WARPGROUPS; ++w) sum
+ w < 4; ++w) sum
once-scale-left-out: BACKWARD, hopper("test_where_row_tiles_have_one_visit and packed")
    dQ is stored without the scores' scale
- stage_rounded(s.dq[g][0], dQ, scale);
+ stage_rounded(s.dq[g][0], dQ, 1.0f);
once-staged-without-swizzle: BACKWARD, hopper("test_where_row_tiles_have_one_visit and packed")
    rows of dQ are laid down as if their pieces were not permuted
- (piece ^ lane % 8) * 16;
+ piece * 16;
# -- FP8
fp8-scale-left-out: FP8, fp8("test_shapes and causal and 128")
    scores are not multiplied by K's scale
- softmax(S, alpha, to_log2 * scales.x);
+ softmax(S, alpha, to_log2);
fp8-scale-of-the-visit-before: FP8, fp8("test_shapes and causal and 128")
    O is not brought from one block of V's scale to the next
- alpha[0] *= ratio, alpha[1] *= ratio;
+
fp8-flush-skipped: FP8, fp8("test_sums_over_many_keys and 128")
    one accumulator takes the products of all visits
-     constexpr int SLICES = DV / SLICE;
-
+     constexpr int SLICES = DV / SLICE;
+ #if FS_DV <= 128
+     for (int e = 0; e < DV / 2; ++e) O[e] *= alpha[e / 2 % 2];
+     wgmma_fence();
+     for (int x = 0; x < BLOCK_K / 32; ++x)
+         wgmma_pv(O, P[x], descriptor(v, 0) + along_row(x, DV), 1);
+     wgmma_commit();
+     wgmma_wait<0>();
+     pin(O);
+     if (true) return;
+ #endif
+
fp8-v-in-its-order: QUANTIZE, fp8("test_shapes and ragged and 64")
    V is transposed, but the keys of a sixteen stay in their order
- first + key_at(four, j);
+ first + 4 * four + j;
fp8-quantised-v-in-its-order: QUANTIZE, fp8("test_the_quantisers_v")
    the same of the quantiser
- return key_at(own_four(piece), piece % 4);
+ return 4 * own_four(piece) + piece % 4;
fp8-q-alone-rotated: QUANTIZE, fp8("test_fa3s_outliers")
    K is not rotated
- turned = ROTATE && !of_v;
+ turned = ROTATE && t.which == OF_Q;
# -- Hopper's forward
q-not-awaited: HOPPER_FORWARD, hopper("test_features and ragged and 128")
    scores are computed before the copy engine has brought Q
- wait(&s.q_full[g], q_parity);
+
k-not-awaited: HOPPER_FORWARD, hopper("test_features and many and 256")
    the second visit's scores are computed before its K has arrived
- if (last > begin) {
+ if (false) {
v-not-awaited: HOPPER_FORWARD, hopper("test_features and many and 256")
    but for the last one, a visit's output is computed before its V has arrived
- wait(&s.v_full[ring_v.stage], ring_v.parity);
-                 issue_output(
+ issue_output(
v-overwritten: HOPPER_FORWARD, hopper("test_features and ragged and 64")
    every tile of V is copied over the last one, into the first stage
- copy_tile(s.v[ring_v.stage], map_v,
+ copy_tile(s.v[0], map_v,
cuda-o-not-rescaled: HOPPER_FORWARD, hopper("test_kinds and rising and 64")
    O keeps the scale of an older maximum
- O[e] *= alpha[e / 2 % 2];
+ ;
hopper-largest-as-integers: HOPPER_FORWARD, hopper("test_kinds and below and 64")
    of scores that are all below 0 the smallest is taken for the largest
- if (__builtin_expect(below, false)) {
+ if (false) {
cuda-lse-without-log: HOPPER_FORWARD, hopper("test_features and ragged and 64")
    LSE is the maximum
-  + __logf(l);
+ ;
forward-mask-off-by-one: HOPPER_FORWARD, hopper("test_features and causal and 64")
    the diagonal itself is masked
- (c > last ||
+ (c >= last ||
masks-start-at-0: HOPPER_FORWARD, hopper("test_features and varlen and 64")
    the keys of every packed sequence are masked as the first one's
- const int key = it.base + visit.tile * 2 * N
+ const int key = visit.tile * 2 * N
wrong-key-head: HOPPER_FORWARD, hopper("test_features and causal and 64")
    query heads take key heads in turn, not in groups
- head : head / a.group,
+ head : head % (a.heads / a.group),
packed-heads-all-the-first: HOPPER_FORWARD, packed("test_results and more and 64")
    all rows of a query are stored as those of the group's first head
- head = walk_head * FS_PACK + member_of(row);
+ head = walk_head * FS_PACK;
packed-rows-as-queries-in-the-mask: HOPPER_FORWARD, packed("test_results and more and 64")
    the mask takes the number of a packed row for that of its query
- query_of(row + 8 * r)
+ row + 8 * r
ragged-keys-counted: HOPPER_FORWARD, hopper("counts and ragged and 96 and ascending")
    keys past the end count as loaded
- min(BLOCK_K, it.end - key) * FS_COUNTED * 2
+ BLOCK_K * FS_COUNTED * 2
v-counted-at-once: HOPPER_FORWARD, hopper("counts and ragged and 96 and ascending")
    all of a row's V counts as loaded in its first visit
- report_one(a.visit_counts + (first + v - 1) * 8 + 1,
+ report_one(a.visit_counts + first * 8 + 1,
# -- what all of Hopper's kernels share
counter-not-reset: WORK, hopper("side_by_side")
    a launch leaves the work counter where it ended, and the next one begins there
- atomicInc(counter, items - 1)
+ atomicAdd(counter, 1)
view-of-the-next-row: WORK, hopper("test_features and varlen and 64")
    boxes of a packed sequence are asked of the view that ends a row later
- Place{ROUND - stop + row, stop}
+ Place{ROUND - stop + row, stop + 1}
# -- Hopper's backward: order, who may read what and when
tiles-not-awaited: BACKWARD, hopper("test_features and 128 and (many or more)")
    products start before the copy engine has brought Q and dO
- wait(&s.full[stage], ring.parity);
+
keys-not-awaited: BACKWARD, hopper("test_features and many and 128")
    products start before the copy engine has brought K and V
- wait(&s.kv_full, kv_parity);
+
# Behind V's wait the copy mostly comes when K is no longer read: so it goes before.
keys-overwritten: SHARED, hopper("test_features and many and 128")
    the next item's K, which nothing waits for, is copied over the one that is still read
-                 if (FS_CLUSTER == 1) wait(&s.v_empty, kv_parity ^ 1);
-                 arrive_expect(&s.kv_full, sizeof(s.k) + sizeof(s.v));
-                 const Place own = place(it.own.start, it.own.stop, batch);
-                 copy_own_tile(s.v, map_v, &s.kv_full, own, kv_head);
-                 if (FS_CLUSTER == 1) wait(&s.k_empty, kv_parity ^ 1);
-                 copy_own_tile(s.k, map_k, &s.kv_full, own, kv_head);
-
+                 arrive_expect(&s.kv_full, sizeof(s.k) + sizeof(s.v));
+                 const Place own = place(it.own.start, it.own.stop, batch);
+                 copy_own_tile(s.k, map_k, &s.kv_full, own, kv_head);
+                 if (FS_CLUSTER == 1) wait(&s.v_empty, kv_parity ^ 1);
+                 copy_own_tile(s.v, map_v, &s.kv_full, own, kv_head);
+
ds-not-awaited: BACKWARD, hopper("test_features and ragged")
    dQ starts before the other warpgroup has written its dS
- named_sync(DS_READY, 128 * WARPGROUPS);
+
deferred-ds-not-awaited: BACKWARD, hopper("several_cluster_sizes and problem0 and True")
    dQ of the last visit starts though the other warpgroup may not have written its dS
- if (due) wait(&s.ds_full[of], stage ? ring.parity : ring.parity ^ 1);
+
wide-scores-not-awaited: WIDE, hopper("test_features and ragged and 256")
    dV starts before the other warpgroup has written its P
- named_sync(SCORES_READY, 128 * WARPGROUPS);
+
out-of-turn: BACKWARD, hopper("two_hundred and 1024 and 128")
    dQ is added in whatever order blocks come
- wait_turn(turn, a.ranks[a.ptr[it.outer] + step.v]);
+
# -- Hopper's backward: masks and bounds
mask-skipped: SHARED, hopper("test_features and causal and 64")
    masked tiles are treated as full ones
- if (!masked) return;
- #pragma unroll
+ return;
+ #pragma unroll
mask-off-by-one: SHARED, hopper("test_features and causal and 64")
    the diagonal itself is masked
- (c < first ||
+ (c <= first ||
dq-mask-off-by-one: DQ, hopper("test_features and causal and 64")
    the diagonal itself is masked in dQ's own pass
- (c > last ||
+ (c >= last ||
sequences-start-at-0: SHARED, hopper("test_features and varlen")
    the rows of every packed sequence are read from the first one's tiles
- const int query = it.base + it
+ const int query = it
# -- Hopper's backward: arithmetic
cuda-delta-left-out: SHARED, hopper("test_features and ragged and 128")
    dS = P dP
- : lse[i] * unit, -delta[i],
+ : lse[i] * unit, 0.0f,
lse-in-base-e: SHARED, hopper("test_features and (softcap or ragged) and 256")
    the log-sum-exp is not taken to base 2
- : -LOG2E;
+ : -1.0f;
dk-not-scaled: BACKWARD, hopper("test_features and many and 128")
    dK misses the scale
- row, dK, r, a.scale, exists)
+ row, dK, r, 1.0f, exists)
wrong-query-head: SHARED, hopper("test_features and causal and 128")
    every query head of a group is taken for the first
- kv_head * a.group + step.member;
+ kv_head * a.group;
half-of-dq: DQ, hopper("test_features and ragged and 128")
    the second half of the keys is left out of dQ
- dQ[c + e] += s.partial[e][threadIdx.x % 128];
+ ;
dq-columns-swapped: BACKWARD, hopper("test_features and ragged and 128")
    both warpgroups add their columns of dQ to the first ones
- return (SPLIT_COLUMNS ? 64 * g : 0) +
+ return
columns-left-out: WORK, hopper("test_head_dims and bfloat16")
    columns beyond the last whole sixteen are not multiplied
- + step - 1) / step
+ ) / step
wide-staging-not-swizzled: WIDE, hopper("test_head_dims and bfloat16")
    dQ of 192 columns is staged without the copy engine's swizzle
- ^ (row % 8) ^ (odd
+ ^ (odd
staging-not-swizzled: BACKWARD, hopper("test_features and ragged and 64")
    dQ is staged without the copy engine's swizzle
- (dq_piece ^ dq_row) * 16
+ dq_piece * 16
narrow-columns-shared: WIDE, hopper("test_head_dims and bfloat16")
    both warpgroups multiply the same half of the middle chunk
- return 64 + 32 * g;
+ return 64;
# -- Hopper's backward by roles; test_emulated_hopper.py sees these on a CPU
roles-delta-of-another-row: ROLES, hopper("by_roles and ragged")
    every second row of dS takes the row before's delta
- + delta[i / 2 % 2]);
+ + delta[0]);
roles-mask-off-by-one: ROLES, hopper("by_roles and causal")
    the diagonal itself is masked
- (c > last ||
+ (c >= last ||
roles-p-not-swizzled: ROLES, hopper("by_roles and ragged")
    P and dS are stored without the swizzle of a right operand
- ^ key % 8) * 8
+ ) * 8
roles-dq-of-other-columns: ROLES, hopper("by_roles and ragged")
    dQ is that of the columns 64 further on
- issue_dq(dQ, s.ds, s.k[0]);
+ issue_dq(dQ, s.ds, s.k[1]);
roles-halves-of-a-sum-swapped: ROLES, hopper("by_roles and ragged")
    of sixteen keys of dK and dV the second eight are stored first
- lane / 2 % 2 * 8 + lane / 4;
+ (1 - lane / 2 % 2) * 8 + lane / 4;
roles-dk-not-scaled: ROLES, hopper("by_roles and ragged")
    dK misses the scale
- kv_heads, sum, a.scale)
+ kv_heads, sum, 1.0f)
# -- Hopper's backward: clusters
others-left-out: BACKWARD, hopper("test_every_cluster and causal and 128")
    a block of a cluster adds up its own dK and dV only
- block < FS_CLUSTER; ++block
+ block < 1; ++block
steps-taken-twice: SHARED, hopper("test_every_cluster and causal and 64")
    a block of a cluster also takes what those after it take
- return steps * (cluster_rank() + 1) / FS_CLUSTER - first;
+ return steps - first;
shares-from-the-start: SHARED, hopper("test_every_cluster and causal and 64")
    every block of a cluster begins with the item's first visit
- if (steps) member = first / visits, v = first % visits;
+
keys-counted-by-all: SHARED, hopper("test_every_cluster and causal and 64")
    every block of a cluster counts K and V as loaded
- cluster_rank() ? 0 : it.own.stop
+ it.own.stop
items-taken-twice: SHARED, hopper("several_cluster_sizes and True")
    the launch behind clusters begins with their items, not with the others
- w = a.first + first_work();
+ w = first_work();
# -- Hopper's backward: a visit for all query heads of a group before the next visit
never-back: SHARED, hopper("in_step and causal and 128")
    items that begin at the last row tile go on from there
- member = 0, v += it.way;
+ member = 0, v += 1;
# -- Hopper's backward: counts
ragged-rows-counted: SHARED, hopper("counts and ragged and 96 and ascending")
    rows past the end count as loaded
- const int rows = min(BLOCK_Q, it.end - query);
+ const int rows = BLOCK_Q;
# -- "flash2-fused-first"; test_emulated_hopper.py sees these on a CPU
first-visit-adds: SHARED, hopper("test_features and causal and 64")
    the first visit adds its part of dQ to whatever memory holds
- atomicCAS(piece, 0, 1) == 0) return true;
+ atomicCAS(piece, 0, 2) == 0) return false;
# -- the portable kernels; test_emulated.py sees these on a CPU
portable-o-not-rescaled: FORWARD, values("test_kinds and bfloat16-rising")
    O keeps the scale of an older maximum
- o[i][c][x] *= alpha[x / 2];
+ ;
portable-o-not-normalised: FORWARD, values("test_features and gqa-float16")
    O is stored without the division by l
- sum == 0.0f ? 0.0f : 1.0f / sum;
+ 1.0f;
portable-mask-off-by-one: FORWARD, values("test_features and gqa-float16")
    the diagonal itself is masked
- lane % 4 * 2 + x))
+ lane % 4 * 2 + x + 1))
portable-v-counted-at-once: FORWARD, counts("bfloat16-sides0-gqa-ascending")
    all of a row's V counts as loaded in its first visit
- report(visit_count + n * 8, k_bytes, v_bytes);
+ report(visit_count + n * 8, k_bytes, 0), report(visit_count, 0, v_bytes);
portable-f32-o-not-rescaled: FORWARD_F32, values("test_kinds and float32-rising")
    O keeps the scale of an older maximum
- o[r][x] *= alpha;
+ ;
portable-delta-left-out: DKDV, values("test_features and gqa-float16")
    dS = P dP
- #else
-                         ds[i][c][x] = p[i][c][x] * (ds[i][c][x] - (x % 2 ? delta.y : delta.x));
+ #else
+                         ds[i][c][x] = p[i][c][x] * ds[i][c][x];
portable-rows-of-a-batch-in-one: ROWS, values("test_features and gqa-float16")
    delta's rows that a thread loads together are added up in the first of them
- sum[j] += dot(x[j], y[j]);
+ sum[0] += dot(x[j], y[j]);
portable-half-of-dq-rounded-twice: ROWS, values("test_features and gqa-float16")
    of eight numbers of dQ the first four are rounded twice, the others not
- y[j] = acc[2 * e + 1];
+ y[j] = acc[2 * e];
portable-dk-not-scaled: DKDV, values("test_features and gqa-float16")
    dK misses the scale
- dk[i], a.scale, a.scale);
+ dk[i], 1.0f, 1.0f);
portable-wrong-query-head: DKDV, values("test_features and gqa-float16")
    every query head of a group is taken for the first
- head = kv_head * a.group + member;
+ head = kv_head * a.group;
portable-dq-mask-off-by-one: PORTABLE_DQ, values("test_features and gqa-float16")
    the diagonal itself is masked in dQ's own pass
- lane % 4 * 2 + x))
+ lane % 4 * 2 + x + 1))
""",
    globals(),
)
