"""Generates CUDA C++ source from an expression graph: one statement per node, in order.

The CUDA compiler hoists computations that depend only on the query or only on the key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from flashsim.functions.derivative import DOUT, adjoints
from flashsim.functions.emit_expressions import CUDA_TYPES, Writer
from flashsim.functions.graph import ArraySpec, Graph, Node, needed
from flashsim.functions.intervals import bounded, without_poles
from flashsim.functions.spans import HIGHEST, LOWEST, Range, Spans, roots

_ELEMENTS = {
    **{"bool": "unsigned char", "uint8": "unsigned char", "int8": "signed char", "int16": "short"},
    **{"int32": "int", "int64": "long long", "float32": "float", "float64": "double"},
    **{"float16": "unsigned short", "bfloat16": "unsigned short"},
}
#: Helper functions that the emitted code calls. FLASH_FAST_TANH selects the hardware's tanh, whose
#: relative error is 2^-11.
_PRELUDE = """\
__device__ __forceinline__ float flash_exp(float x) { return exp2f(x * 1.4426950408889634f); }
__device__ __forceinline__ float flash_tanh(float x) {
#ifdef FLASH_FAST_TANH
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return tanhf(x);
#endif
}
__device__ __forceinline__ float flash_sigmoid(float x) {
    return 0.5f * flash_tanh(0.5f * x) + 0.5f;
}
__device__ __forceinline__ float flash_half(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ float flash_bfloat16(unsigned short x) {
    return __uint_as_float((unsigned int)x << 16);
}
__device__ __forceinline__ int flash_floordiv(int a, int b) {
    if (b == 0) b = 1;
    const int quotient = a / b;
    return quotient - ((a % b != 0) && ((a < 0) != (b < 0)));
}
__device__ __forceinline__ int flash_mod(int a, int b) {
    return a - flash_floordiv(a, b == 0 ? 1 : b) * (b == 0 ? 1 : b);
}
// Whether a == b, where a or b is a maximum. ptxas (12.9 to 13.4) compiles the comparisons
// max(max(x, y), 0) == y and max(min(x, y), 0) == y to one instruction (VIMNMX.RELU), whose
// predicate says whether the maximum equals x. It does not do this for an exclusive or.
__device__ __forceinline__ bool flash_same(int a, int b) {
    int apart;
    asm("xor.b32 %0, %1, %2;" : "=r"(apart) : "r"(a), "r"(b));
    return apart == 0;
}
// A position as a base that many scores share, plus a step. Both are converted to float separately.
// Steps that are constants need no conversion at run time, so one conversion serves many scores.
struct FlashAt {
    int base, step;
    __device__ __forceinline__ FlashAt(int base, int step = 0) : base(base), step(step) {}
    __device__ __forceinline__ operator int() const { return base + step; }
};
// A negative index counts from the end; an index out of range reads the nearest element.
__device__ __forceinline__ int flash_wrap(int i, int n) {
    if (i < 0) i += n;
    return max(0, min(i, n - 1));
}
"""


class Field(NamedTuple):
    """A member of the struct `FlashCaptured`: data, gradient or an axis's length of an array."""

    name: str
    what: str
    array: int
    axis: int = 0


class CudaSource(NamedTuple):
    """CUDA C++ code of `FlashCaptured`, `flash_mask`, `flash_score` and `flash_score_grad`.

    `fields` lists the members of the struct `FlashCaptured` in order: first 8-byte pointers, then
    4-byte lengths. `arrays` has the score function's captured arrays, followed by the mask
    function's and those of the mask's ranges. `gradients` names the captured arrays whose gradients
    the kernel accumulates.
    """

    text: str
    fields: tuple[Field, ...]
    arrays: tuple[ArraySpec, ...]
    gradients: tuple[str, ...]

    def pack(self, data: Iterable[int], gradients: Iterable[int] = ()) -> np.ndarray:
        """Return the CUDA struct `FlashCaptured`, passed by value, as a NumPy array of one element.

        `data` holds the device addresses of `arrays`. Each array is contiguous, in its own element
        type. `gradients` holds the device addresses of the kernel's float32 gradient arrays, in the
        order of the attribute `gradients`.
        """
        addresses = list(data)
        of_gradient = dict(zip(self.gradients, gradients, strict=True))
        kinds, values = [], []
        for f in self.fields:
            spec = self.arrays[f.array]
            kinds.append((f.name, np.int32 if f.what == "length" else np.uint64))
            if f.what == "length":
                values.append(spec.shape[f.axis])
            else:
                values.append(addresses[f.array] if f.what == "data" else of_gradient[spec.name])
        if not kinds:
            kinds, values = [("nothing", np.int32)], [0]
        return np.array(tuple(values), np.dtype(kinds, align=True))


def cuda_source(
    mask: Graph | None = None,
    score: Graph | None = None,
    gradients: Collection[str] = (),
    extents: Mapping[str, int] | None = None,
    tile: int | None = None,
    band: tuple[int, int] | None = None,
    ramp: tuple[tuple[int, ...], int] | None = None,
    spans: Spans | None = None,
) -> CudaSource:
    """Return the CUDA source of a mask and a score function, either of which may be missing.

    Without a mask function, every score is kept; without a score function, scores are unchanged.
    `gradients` names the score function's captured arrays that get gradients from
    `flash_score_grad`. `extents` has the numbers of possible values of b, h, q and k. With
    `extents`, the generated code does not check array indices that cannot be out of range.

    `tile` is the number of a node in the score function's graph that loads an array element. The
    kernel loads this element in advance, so a second overload of `flash_score` takes the element as
    an argument after the score. If the load's last two indices are q and k, `flash_tile_plane`
    returns the number of a head's (q, k) plane in the array. If `band` = (sign, offset) is passed,
    the load's last index is sign * (q - k) + offset. The generated function `flash_band` returns
    the array's element for a distance q - k. For an index out of range, `flash_band` returns the
    nearest element.

    With `ramp` = (factors, steps), the score function adds a product to the score. The product
    multiplies the nodes `factors`, which depend only on the head, by an integer that grows by
    `steps` per key. The generated function `flash_ramp_step` returns by how much the product grows
    per key.

    With `spans`, the generated functions `flash_keys` and `flash_queries` return the range of keys
    that the mask keeps for a query, and the range of queries that it keeps for a key.
    """
    arrays = (*(score.arrays if score else ()), *(mask.arrays if mask else ()))
    functions_read, arrays = len(arrays), (*arrays, *(spans.arrays if spans else ()))
    first_of_mask = len(score.arrays) if score else 0
    wanted = tuple(a.name for a in (score.arrays if score else ()) if a.name in set(gradients))
    fields = [Field(f"a{n}", "data", n) for n in range(functions_read)]
    fields += [Field(f"g{n}", "gradient", n) for n, a in enumerate(arrays[:first_of_mask])
               if a.name in wanted]  # fmt: skip
    fields += [Field(f"a{n}", "data", n) for n in range(functions_read, len(arrays))]
    fields += [
        Field(f"a{n}_n{axis}", "length", n, axis)
        for n, a in enumerate(arrays)
        for axis in range(len(a.shape))
    ]
    lines = [_PRELUDE, "struct FlashCaptured {"]
    for f in fields:
        element = _ELEMENTS[arrays[f.array].dtype]
        kinds = {"data": f"const {element}*", "gradient": "float*", "length": "int"}
        lines.append(f"    {kinds[f.what]} {f.name};  // {arrays[f.array].name}")
    lines += ["    int nothing;" * (not fields), "};"]

    functions, per_head = [_HEAD.format("bool", "flash_mask", "")], []
    if mask is None:
        functions.append("    return true;")
    else:
        cuda = Writer(mask.nodes, mask.arrays, first_of_mask, extents, "m")
        per_head.append(cuda)
        functions += [*cuda.statements(), f"    return {cuda.name(mask.root)};"]
    functions += ["}"]
    if mask is not None and spans is not None:
        every = (*mask.arrays, *spans.arrays)
        numbers = needed(spans.nodes, roots((spans.keys, spans.queries)))
        cuda = Writer(spans.nodes, every, first_of_mask, extents, "r", numbers)
        per_head.append(cuda)
        functions += _range_lines(cuda, spans)
    functions += [_HEAD.format("float", "flash_score", "float s, ")]
    if score is None:
        functions.append("    return s;")
    else:
        cuda = Writer(score.nodes, score.arrays, 0, extents, "s")
        per_head.append(cuda)
        functions += [*cuda.statements(), f"    return {cuda.name(score.root)};"]
        if tile is not None:
            functions += ["}", *_tile_lines(score, tile, band, extents)]
        if ramp is not None:
            functions += ["}", *_ramp_lines(cuda, *ramp)]
    functions.append("}")
    functions += _gradient_lines(score, wanted, extents, per_head)
    lines += [*_head_lines(per_head), *functions]
    text = "\n".join(line for line in lines if line) + "\n"
    return CudaSource(text, tuple(fields), arrays, wanted)


#: The first lines of an emitted function; filled in are its type, its name and more parameters.
_HEAD = """\
__device__ __forceinline__ {} {}(const FlashCaptured& c, {}const FlashHead& at, FlashAt q_at,
                                 FlashAt k_at) {{
    const int b = at.b, h = at.h, q = q_at, k = k_at;"""


def _range_lines(cuda: Writer, spans: Spans) -> list[str]:
    """Return the CUDA source of the functions `flash_keys` and `flash_queries`."""
    lines = [
        *("#define FLASH_RANGES 1", f"#define FLASH_KEYS_LOW {int(spans.keys.low is not None)}"),
        f"#define FLASH_QUERIES_HIGH {int(spans.queries != Range(low=spans.queries.low))}",
        "struct FlashRange { int low, high; };",
    ]
    ranges: tuple[tuple[str, str, Range], ...] = (
        ("flash_keys", "q", spans.keys),
        ("flash_queries", "k", spans.queries),
    )
    for name, position, kept in ranges:
        low = str(LOWEST) if kept.low is None else cuda.name(kept.low)
        high = str(HIGHEST) if kept.high is None else cuda.name(kept.high)
        if kept.keep is not None:
            high = f"{cuda.name(kept.keep)} ? {high} : {LOWEST - 1}"
        lines += [
            f"__device__ __forceinline__ FlashRange {name}(const FlashCaptured& c, "
            f"const FlashHead& at, FlashAt {position}_at) {{",
            f"    const int b = at.b, h = at.h, {position} = {position}_at;",
            *cuda.statements(needed(spans.nodes, roots([kept]))),
            *(f"    return {{{low}, {high}}};", "}"),
        ]
    return lines


def _tile_lines(
    score: Graph, tile: int, band: tuple[int, int] | None, extents: Mapping[str, int] | None
) -> list[str]:
    """Return the CUDA source of the functions that use an array element loaded in advance.

    The source defines `flash_tile_plane` or `flash_band`, and the second overload of `flash_score`.
    The source lacks the last closing brace.
    """
    cuda, node = Writer(score.nodes, score.arrays, 0, extents, "s"), score.nodes[tile]
    before = len(node.args) - (2 if band is None else 1)  # axes whose index belongs to the head
    plane = cuda.offset(node, before)
    lines = ["    const int b = at.b, h = at.h;"]
    lines += cuda.statements(needed(cuda.nodes, node.args[:before]))
    take = "const FlashCaptured& c, const FlashHead& at"
    if band is None:
        head = f"__device__ __forceinline__ int flash_tile_plane({take}) {{"
        lines += [f"    return {plane};", "}"]
    else:
        head = f"__device__ __forceinline__ float flash_band({take}, int distance) {{"
        (sign, offset), length = band, f"c.a{node.value}_n{before}"
        lines += [f"    const int i = max(0, min({sign} * distance + {offset}, {length} - 1));"]
        index = f"({plane}) * (long long){length} + i"
        lines += [f"    return {cuda.element(node, index)};", "}"]
    cuda.given[tile] = "tile"
    lines.append(_HEAD.format("float", "flash_score", "float s, float tile, "))
    return [head, *lines, *cuda.statements(), f"    return {cuda.name(score.root)};"]


def _ramp_lines(cuda: Writer, factors: tuple[int, ...], steps: int) -> list[str]:
    """Return the CUDA source of the function `flash_ramp_step`, without the last closing brace."""
    return [
        "__device__ __forceinline__ float flash_ramp_step(const FlashCaptured& c, "
        "const FlashHead& at) {",
        "    const int b = at.b, h = at.h;",
        *cuda.statements(needed(cuda.nodes, factors)),
        f"    return {' * '.join([f'{float(steps)!r}f', *map(cuda.name, factors)])};",
    ]


def _head_lines(per_head: Iterable[Writer]) -> list[str]:
    """Return the source of the struct `FlashHead` and of the function `flash_head`."""
    members, reads = [], []
    for cuda in per_head:
        for n in sorted(cuda.hoisted):
            members.append(f"    {CUDA_TYPES[cuda.nodes[n].kind]} {cuda.prefix}{n};")
        inner = [a for n in cuda.hoisted for a in cuda.nodes[n].args]
        own = [f"    {text}" for text in cuda.statements(needed(cuda.nodes, inner))]
        own += [
            f"        at.{cuda.prefix}{n} = {cuda.expression(cuda.nodes[n])};"
            for n in sorted(cuda.hoisted)
        ]
        reads += ["    {", *own, "    }"]
    return [
        *("// A head, and the elements loaded once per head.", "struct FlashHead {"),
        "    int b, h;",
        *(*members, "};"),
        "__device__ __forceinline__ FlashHead flash_head(const FlashCaptured& c, int b, int h) {",
        *("    FlashHead at;", "    at.b = b, at.h = h;", *reads, "    return at;", "}"),
    ]


#: Adds up the sums of a warp's lanes, with one atomic add per sum. All 32 lanes must run this code,
#: and must work on the same head.
_ADD_SUM = """\
    {
        float x = sums.v%d;
        for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
        if ((threadIdx.x & 31) == 0) atomicAdd(%s, x);
    }"""


def _gradient_lines(
    score: Graph | None,
    wanted: tuple[str, ...],
    extents: Mapping[str, int] | None,
    per_head: list[Writer],
) -> list[str]:
    """Return the CUDA source that computes and sums a score function's gradients."""

    def begin(more: str) -> str:
        return _HEAD.format("float", "flash_score_grad", f"{more}float s, float dout, ")

    struct = "struct FlashSums {{ {} }};"
    empty = "__device__ __forceinline__ void flash_add_sums("
    empty += "const FlashCaptured& c, const FlashSums& sums, const FlashHead& at) {"
    if score is None:
        grad = [begin(""), "    return dout;", "}"]
        grad += [begin("FlashSums&, "), "    return dout;", "}"]
        return [struct.format("float nothing = 0.0f;"), *grad, empty, "}"]
    made = adjoints(score, wanted)
    numbers = made.numbers
    cuda = Writer(made.nodes, made.arrays, 0, extents, "g", numbers)
    per_head.append(cuda)
    depends = Graph(made.nodes, made.root, made.arrays).depends
    fixed = {n for n, _ in made.reads if depends[n] <= {"b", "h"}}
    members = " ".join(f"float v{n} = 0.0f;" for n in sorted(fixed)) or "float nothing = 0.0f;"
    lines = [struct.format(members)]
    safe = _vanishing(made.nodes, without_poles(made.nodes, extents or {}))
    summed = _vanishing(made.nodes, bounded(made.nodes, extents or {}))

    def zero_with_dout(n: int, vanishing: list[bool]) -> str:
        return cuda.name(n) if vanishing[n] else f"dout == 0.0f ? 0.0f : {cuda.name(n)}"

    slope = "0.0f" if made.score is None else zero_with_dout(made.score, safe)
    result = f"    return {slope};"
    for kept, extra in ((fixed, "FlashSums& sums, "), (set(), "")):
        lines += [begin(extra), *cuda.statements(numbers)]
        for n, g in made.reads:
            to = f"c.g{made.nodes[n].value} + {cuda.offset(made.nodes[n])}"
            x = zero_with_dout(g, summed)
            add = f"sums.v{n} += {x};" if n in kept else f"atomicAdd({to}, {x});"
            lines.append(f"    {add}")
        lines += [result, "}"]
    lines += [empty, "    const int b = at.b, h = at.h;"]
    ends = [n for n, _ in made.reads if n in fixed]
    lines += cuda.statements(needed(made.nodes, [a for n in ends for a in made.nodes[n].args]))
    for n in ends:
        lines.append(_ADD_SUM % (n, f"c.g{made.nodes[n].value} + {cuda.offset(made.nodes[n])}"))
    return [*lines, "}"]


def _vanishing(nodes: tuple[Node, ...], finite: list[bool]) -> list[bool]:
    """Return one bool per node: True if the node is certainly 0 where `dout` is 0.

    A product with `dout` is 0 unless the other factor is infinite or NaN, as at a score that a
    captured bias of -inf masks. `finite` says which nodes are certainly finite.
    """
    found: list[bool] = []
    for node in nodes:
        of = [found[a] for a in node.args]
        if node.op == "arg":
            yes = node.value == DOUT
        elif node.op == "const":
            yes = node.value == 0
        elif node.op == "mul":
            yes = any(of[x] and (of[1 - x] or finite[node.args[1 - x]]) for x in (0, 1))
        elif node.op == "div":
            by = nodes[node.args[1]]
            yes = of[0] and by.op == "const" and by.value != 0
        elif node.op == "where":
            yes = all(of[1:])
        else:
            yes = node.op in ("add", "sub", "neg") and all(of)
        found.append(yes)
    return found
