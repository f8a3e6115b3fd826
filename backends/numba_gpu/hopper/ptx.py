"""Functions that each emit one of Hopper's own PTX instructions (sm_90a).

The module `backends.numba_gpu.ptx` has the instructions of sm_80.

Docstrings name the section of NVIDIA's *PTX ISA* that describes the instruction. Addresses in
shared memory are 32-bit. A *warpgroup* is four consecutive warps, of which the first has a number
that is a multiple of four.

In shared memory, a tile of 16-bit elements consists of *chunks* of 64 columns. Row r of a chunk is
the 128 bytes at offset 128 r, in which TMA permutes eight 16-byte pieces by r % 8 (the 128-byte
swizzle). Chunks start at multiples of 1024 bytes. If the width is no multiple of 64, a tile may
instead have *narrow* chunks of 16 columns. Row r of a narrow chunk is the 32 bytes at offset 32 r.
In a narrow chunk, the two 16-byte pieces of row r are swapped where r / 4 is odd (the 32-byte
swizzle).
"""

from llvmlite import ir

from flashsim.backends.numba_gpu.emit import (
    F32,
    I32,
    I64,
    Values,
    asm,
    instruction,
    struct_values,
)

CHUNK = 64  # columns
_FOUR_FLOATS = ir.LiteralStructType([F32] * 4)

# -- mbarriers: count arrivals, and bytes that TMA has yet to deliver -----------------------------


def barrier_init(b: ir.IRBuilder, barrier: ir.Value, arrivals: int) -> None:
    """Initialize an 8-byte barrier that expects `arrivals` arrivals per phase ("mbarrier.init")."""
    asm(b, f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", "r", [barrier], effects=True)


def barrier_init_fence(b: ir.IRBuilder) -> None:
    """Make the barriers that this thread initialized visible to TMA ("fence.proxy", "membar")."""
    asm(b, "fence.mbarrier_init.release.cluster;", "", [], effects=True)
    fence_async(b, space="shared::cta")


def barrier_arrive(b: ir.IRBuilder, barrier: ir.Value, condition: ir.Value) -> None:
    """Arrive at a barrier in the threads for which `condition` holds ("mbarrier.arrive")."""
    text = "{.reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0];}"
    asm(b, text, "r,r", [barrier, b.zext(condition, I32)], effects=True)


def barrier_expect(b: ir.IRBuilder, barrier: ir.Value, *, count: int) -> None:
    """Arrive at a barrier whose phase must also receive `count` bytes ("mbarrier.arrive")."""
    text = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {count};"
    asm(b, text, "r", [barrier], effects=True)


def barrier_wait(b: ir.IRBuilder, barrier: ir.Value, parity: ir.Value) -> None:
    """Wait until the phase of a barrier with this parity is over ("mbarrier.try_wait").

    Successive phases have parity 0, 1, 0, and so on. On a new barrier, a wait for parity 1 returns
    immediately.
    """
    text = (
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
        "@!p bra again;}"
    )
    asm(b, text, "r,r", [barrier, parity], effects=True)


# -- named barriers: 0 is syncthreads -------------------------------------------------------------


def named_sync(b: ir.IRBuilder, number: ir.Value, *, threads: int) -> None:
    """Arrive at a named barrier, and wait until `threads` threads have arrived ("bar.sync")."""
    asm(b, f"bar.sync $0, {threads};", "r", [number], effects=True, together=True)


def named_arrive(b: ir.IRBuilder, number: ir.Value, *, threads: int) -> None:
    """Arrive at a named barrier without waiting ("bar.arrive")."""
    asm(b, f"bar.arrive $0, {threads};", "r", [number], effects=True, together=True)


# -- clusters of blocks ---------------------------------------------------------------------------


#: ``cluster_sync(b)`` waits for all running threads of the cluster ("barrier.cluster"). After this
#: wait, the cluster's earlier writes to shared memory are visible.
cluster_sync = instruction(
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", together=True
)
#: ``address_in(b, address, block)`` returns the address in block `block` that matches a
#: shared-memory address ("mapa").
address_in = instruction("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", I32, effects=False)


def load_float_from(b: ir.IRBuilder, address: ir.Value, further: int) -> ir.Value:
    """Load a float32 at `further` bytes from an address that `address_in` returned ("ld")."""
    text = f"ld.shared::cluster.f32 $0, [$1+{further}];"
    return asm(b, text, "=f,r", [address], F32, effects=True)


# -- TMA ------------------------------------------------------------------------------------------


def parameter_address(b: ir.IRBuilder, name: str) -> ir.Value:
    """Return the generic address of the kernel parameter with this PTX name ("cvta", `.param`)."""
    text = f"{{.reg .b64 x; mov.b64 x, {name}; cvta.param.u64 $0, x;}}"
    return asm(b, text, "=l", [], I64)


def copy_box(
    b: ir.IRBuilder,
    to: ir.Value,
    tensor_map: ir.Value,
    barrier: ir.Value,
    coordinates: Values,
    blocks: int = 1,
) -> None:
    """Start to copy a box of a tensor to shared memory ("cp.async.bulk.tensor").

    The box begins at `coordinates` (column, row, head, batch). Elements outside the tensor arrive
    as zeros. The barrier `barrier` counts the bytes that arrive. In a cluster of `blocks`, every
    block receives the box at the same address, and every block's barrier counts the bytes.
    """
    rank = len(coordinates)
    where = ", ".join(f"${3 + axis}" for axis in range(rank))
    copy = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    text = f"{copy} [$0], [$1, {{{where}}}], [$2];"
    if blocks > 1:
        text = (
            f"{{.reg .b16 all; mov.b16 all, {(1 << blocks) - 1}; "
            f"{copy}.multicast::cluster [$0], [$1, {{{where}}}], [$2], all;}}"
        )
    asm(b, text, "r,l,r" + ",r" * rank, [to, tensor_map, barrier, *coordinates], effects=True)


def reduce_box(
    b: ir.IRBuilder, tensor_map: ir.Value, source: ir.Value, coordinates: Values
) -> None:
    """Start to add a box of float32 numbers to a tensor in HBM ("cp.reduce.async.bulk.tensor").

    The L2 cache computes the additions. Elements outside the tensor are dropped.
    """
    rank = len(coordinates)
    where = ", ".join(f"${2 + axis}" for axis in range(rank))
    text = (
        f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.tile.bulk_group "
        f"[$0, {{{where}}}], [$1];"
    )
    asm(b, text, "l,r" + ",r" * rank, [tensor_map, source, *coordinates], effects=True)


#: ``reduce_commit(b)`` ends a group of this thread's reductions ("cp.async.bulk.commit_group").
reduce_commit = instruction("cp.async.bulk.commit_group;")


def reduce_wait(b: ir.IRBuilder, *, read: bool) -> None:
    """Wait until this thread's groups of reductions are done ("cp.async.bulk.wait_group").

    With `read`, the thread waits only until the reductions have read their sources.
    """
    asm(b, f"cp.async.bulk.wait_group{'.read' if read else ''} 0;", "", [], effects=True)


def fence_async(b: ir.IRBuilder, *, space: str) -> None:
    """Order this thread's accesses to `space` relative to those by TMA ("fence.proxy.async").

    In shared memory, this fence also covers accesses by matrix products.
    """
    asm(b, f"fence.proxy.async.{space};", "", [], effects=True)


# -- ordered additions: integers in HBM -----------------------------------------------------------


#: ``wait_equal(b, address, value)`` waits until a 32-bit integer in HBM has this value
#: ("ld.acquire"). After the wait, writes that were released together with this value are visible.
wait_equal = instruction(
    "{.reg .pred p; .reg .b32 now; again: ld.acquire.gpu.global.u32 now, [$0]; "
    "setp.ne.u32 p, now, $1; @p bra again;}",
    "l,r",
)
#: ``count_on(b, address)`` adds 1 to a 32-bit integer in HBM, with release semantics
#: ("red.release").
count_on = instruction("red.release.gpu.global.add.u32 [$0], 1;", "l")
#: ``fetch_count(b, address, last)`` increments an integer in HBM, or resets `last` to 0; it returns
#: the old value ("atom").
fetch_count = instruction("atom.global.inc.u32 $0, [$1], $2;", "=r,l,r", I32)


# -- shared memory, synchronously -----------------------------------------------------------------


def store_matrices(b: ir.IRBuilder, to: ir.Value, four: Values, *, trans: str = "") -> None:
    """Store four 8 x 8 matrices of 16-bit elements, laid out as in `ptx.ldmatrix` ("stmatrix")."""
    text = f"stmatrix.sync.aligned.m8n8.x4{trans}.shared::cta.b16 [$0], {{$1, $2, $3, $4}};"
    asm(b, text, "r,r,r,r,r", [to, *four], effects=True, together=True)


def store_transposed(b: ir.IRBuilder, to: ir.Value, four: Values) -> None:
    """Transpose four 8 x 8 matrices, and store them in the layout of `store_matrices`."""
    store_matrices(b, to, four, trans=".trans")


#: ``transposed(b, word)`` transposes an 8 x 8 matrix whose lanes each hold two neighbours of a row
#: ("movmatrix").
transposed = instruction(
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", I32, together=True
)
#: ``store_pair(b, to, x, y)`` and ``store_float(b, to, value)`` store two neighbouring float32, or
#: one, in shared memory.
store_pair = instruction("st.shared.v2.f32 [$0], {$1, $2};", "r,f,f")
store_float = instruction("st.shared.f32 [$0], $1;", "r,f")


def twice(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> Values:
    """Copy two floats to four separate registers: x, y, x, y ("mov").

    A register can be the accumulator of only one product, so a value that initialises two
    accumulators must be copied. The `mov` instruction keeps LLVM from placing these copies between
    two products.
    """
    text = "mov.f32 $0, $4; mov.f32 $1, $5; mov.f32 $2, $4; mov.f32 $3, $5;"
    copies = asm(b, text, "=f,=f,=f,=f,f,f", [x, y], _FOUR_FLOATS, effects=True)
    return struct_values(b, copies, 4)


# -- registers move from one warpgroup to others --------------------------------------------------


def registers(b: ir.IRBuilder, *, count: int, more: bool) -> None:
    """Set the registers per thread of this warpgroup ("setmaxnreg")."""
    way = "inc" if more else "dec"
    text = f"setmaxnreg.{way}.sync.aligned.u32 {count};"
    asm(b, text, "", [], effects=True, together=True)


# -- products of a warpgroup ----------------------------------------------------------------------


def descriptor(b: ir.IRBuilder, address: ir.Value, leading: int) -> ir.Value:
    """Return the lower half of a tile's 64-bit matrix descriptor ("Matrix descriptor format").

    Bits 0 to 13 hold the start address, and the bits from 16 on hold `leading`, both divided by 16
    bytes. The upper half is the same for every tile: eight rows take 1024 bytes, and the swizzle is
    128 bytes wide. The hardware ignores `leading` if the product's k dimension runs along a row. If
    k runs down the rows, `leading` is the distance from one chunk to the next.
    """
    start = b.lshr(b.and_(address, ir.Constant(I32, 0x3FFFF)), ir.Constant(I32, 4))
    return b.or_(start, ir.Constant(I32, leading >> 4 << 16))


_DESCRIPTOR_HIGH = 1024 >> 4 | 1 << 30
_DESCRIPTOR_HIGH_NARROW = 256 >> 4 | 3 << 30


def along_row(step: int, rows: int) -> int:
    """Return the offset of column 16 * `step` of a tile with `rows` rows, in units of 16 bytes."""
    return (step // 4 * rows * 128 + step % 4 * 32) // 16


def down_rows(step: int) -> int:
    """Return the offset of row 16 * `step` of a tile, in units of 16 bytes."""
    return step * 16 * 128 // 16


def wgmma(
    b: ir.IRBuilder,
    bf16: bool,
    n: int,
    c: Values | None,
    left: ir.Value | Values,
    right: ir.Value,
    left_at: list[int],
    right_at: list[int],
    *,
    left_down: bool = False,
    right_down: bool = False,
    right_narrow: bool = False,
) -> Values:
    """Queue a warpgroup's matrix product C + A B as one group ("wgmma.mma_async").

    The product is computed in steps of 16 along k. C has 64 x n float32 elements (`c` is None for C
    = 0). Warp w of the warpgroup has rows 16 w to 16 w + 15. Of every 8 columns, lane l of the warp
    holds rows l / 4 and l / 4 + 8 at columns 2 (l % 4) and 2 (l % 4) + 1, as in `ptx.mma`. The
    returned registers contain the sums only after `wgmma_wait`.

    The operand `left` is A (64 x 16 per step). A may be the `descriptor` of a tile, or a list of
    registers as in `ptx.mma`, four per step. The operand `right` is the descriptor of B (16 x n per
    step). `left_at` (unused for registers) and `right_at` are each step's offsets from a
    descriptor, in units of 16 bytes. With `left_down` or `right_down`, the operand's k dimension
    runs down its tile's rows instead of along a row. With `right_narrow`, B's tile is stored in
    chunks of 16 columns (`NARROW`).

    All steps form a single piece of PTX, with a fence before them and a commit after them. Nothing,
    not even a register move, may come between the fence and a product. Each step adds an offset to
    a 64-bit descriptor, because ptxas would otherwise copy both halves of the descriptor in every
    step.
    """
    count = n // 2
    sums = ", ".join(f"${x}" for x in range(count))
    first = count if c is None else 2 * count  # index of the first operand after the accumulators
    words = left if isinstance(left, list) else [left]
    kind = "bf16" if bf16 else "f16"
    high = _DESCRIPTOR_HIGH_NARROW if right_narrow else _DESCRIPTOR_HIGH
    lines = [
        "{.reg .pred fresh, more; .reg .b32 zero; .reg .b64 left, right, l, r;",
        "mov.b32 zero, 0; setp.ne.b32 fresh, zero, 0; setp.eq.b32 more, zero, 0;",
        f"mov.b64 right, {{${first + len(words)}, {high}}};",
    ]
    if words is not left:
        lines.append(f"mov.b64 left, {{${first}, {_DESCRIPTOR_HIGH}}};")
    lines.append("wgmma.fence.sync.aligned;")
    for step, where in enumerate(right_at):
        if isinstance(left, list):
            a = "{" + ", ".join(f"${first + 4 * step + x}" for x in range(4)) + "}"
            transposed = f"{int(right_down)}"
        else:
            lines.append(f"add.s64 l, left, {left_at[step]};")
            a, transposed = "l", f"{int(left_down)}, {int(right_down)}"
        lines.append(f"add.s64 r, right, {where};")
        add = "fresh" if c is None and step == 0 else "more"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
            f"{{{sums}}}, {a}, r, {add}, 1, 1, {transposed};"
        )
    lines.append("wgmma.commit_group.sync.aligned;}")
    start = [] if c is None else list(c)
    constraints = ["=f"] * count + [str(x) for x in range(len(start))] + ["r"] * (len(words) + 1)
    result = asm(
        b,
        "\n".join(lines),
        ",".join(constraints),
        [*start, *words, right],
        ir.LiteralStructType([F32] * count),
        effects=True,
        together=True,
    )
    return struct_values(b, result, count)


def wgmma_wait(b: ir.IRBuilder, c: Values, *, pending: int) -> Values:
    """Wait for all groups of products except the last `pending` ("wgmma.wait_group").

    After the wait, the accumulators `c` are complete. The instruction takes and returns the
    registers of `c`, so that no code can read `c` before the wait.
    """
    count = len(c)
    complete = asm(
        b,
        f"wgmma.wait_group.sync.aligned {pending};",
        ",".join(["=f"] * count + [str(x) for x in range(count)]),
        c,
        ir.LiteralStructType([F32] * count),
        effects=True,
        together=True,
    )
    return struct_values(b, complete, count)
