"""Generate device functions that apply mask and score functions to fragments of scores.

One device function computes a single score. For a fragment, a second generated function calls the
first one with each element's positions.
"""

import math
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import F32, I16, I32, I64, asm, emitted
from flashsim.backends.numba_gpu.mma_tiles import elements
from flashsim.backends.numba_gpu.traversal import read_int
from flashsim.functions.derivative import adjoints
from flashsim.functions.emit_numba import Written
from flashsim.functions.graph import Graph
from flashsim.functions.operations import BOOL

_TYPES: dict[str, ir.Type] = {
    **{"bool": ir.IntType(8), "uint8": ir.IntType(8), "int8": ir.IntType(8), "int16": I16},
    **{"int32": I32, "int64": I64, "float32": F32, "float64": ir.DoubleType()},
    **{"float16": I16, "bfloat16": I16},
}


def _reader(dtype: str) -> Any:
    """Return ``read(address, index)``, which reads an element in HBM as float32 or int64."""
    whole = not dtype.startswith(("float", "bfloat"))

    @emitted(types.int64 if whole else types.float32, types.int64, types.int64)
    def read(b: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
        pointer = b.inttoptr(address, ir.PointerType(_TYPES[dtype], 1))
        x = b.load(b.gep(pointer, [index]))
        if dtype in ("bool", "uint8"):
            return b.zext(x, I64)
        if whole:
            return x if dtype == "int64" else b.sext(x, I64)
        if dtype in ("float16", "bfloat16"):
            return ptx.unpack(b, dtype == "bfloat16", b.zext(x, I32))[0]
        return b.fptrunc(x, F32) if dtype == "float64" else x

    return read


@emitted(None, types.int64, types.int64, types.float32)
def _add(b: ir.IRBuilder, address: ir.Value, index: ir.Value, x: ir.Value) -> None:
    """Add `x` to ``float32[index]`` in HBM, atomically."""
    at = b.add(address, b.mul(index, ir.Constant(I64, 4)))
    asm(b, "red.global.add.f32 [$0], $1;", "l,f", [at, x], effects=True)


class _AtAddresses(Written):
    """Writes statements in which captured array n has the address ``a.word_n``."""

    def __init__(self, nodes: Any, arrays: Any, first: int) -> None:
        super().__init__(nodes, arrays)
        self.first = first

    def read(self, node: Any) -> str:
        """Return an expression that reads an element of a captured array."""
        dtype, at = self.arrays[node.value].dtype, self.first + node.value
        return f"read_{dtype}(a.word_{at}, I({self.offset(node)}))"

    def lines(self, numbers: Any) -> list[str]:
        """Return the statements of a function's body, one per line."""
        return [f"    {line}" for line in self.statements(numbers)]


_NAMES = {
    **{"I": types.int64, "F": types.float32, "math": math, "cuda": cuda, "add": _add},
    **{f"read_{dtype}": _reader(dtype) for dtype in _TYPES},
}


def _device(text: str, **names: Any) -> Any:
    """Compile a device function from its text, with numba-cuda's names for NumPy's types."""
    known = {**_NAMES, **names}
    text = text.replace("np.int64", "I").replace("np.", "math.")
    exec(compile(text, "<a function for the tensor-core kernels>", "exec"), known)
    return cuda.jit(device=True, inline="always")(known["made"])


def _keep(mask: Graph, first: int) -> Any:
    text = _AtAddresses(mask.nodes, mask.arrays, first)
    body = text.lines(range(len(mask.nodes)))
    head = "def made(a, b, h, i, j):"
    return _device("\n".join([head, *body, f"    return {_truth(text, mask)}"]))


def _truth(text: _AtAddresses, mask: Graph) -> str:
    name = text.name(mask.root)
    return name if mask.nodes[mask.root].kind == BOOL else f"{name} != 0"


def _score(score: Graph) -> Any:
    text = _AtAddresses(score.nodes, score.arrays, 0)
    body = text.lines(range(len(score.nodes)))
    return _device("\n".join(["def made(a, s, b, h, i, j):", *body, _return(text, score.root)]))


def _return(text: _AtAddresses, n: int | None) -> str:
    return f"    return F({'0' if n is None else text.name(n)})"


def _slope(score: Graph, wanted: tuple[str, ...], arrays: int) -> Any:
    """Return ``slope(a, s, dout, b, h, i, j)``, which computes the gradient of the score `s`.

    ``slope`` also adds up gradients of the captured arrays `wanted`. The gradients' addresses
    follow those of all `arrays` captured arrays.
    """
    made = adjoints(score, wanted)
    text = _AtAddresses(made.nodes, made.arrays, 0)
    lines = ["def made(a, s, dout, b, h, i, j):", *text.lines(made.numbers)]
    order = [x.name for x in score.arrays if x.name in wanted]
    for n, g in made.reads:
        node = made.nodes[n]
        word = arrays + order.index(made.arrays[node.value].name)
        lines.append(f"    add(a.word_{word}, I({text.offset(node)}), {text.name(g)})")
    return _device("\n".join([*lines, _return(text, made.score)]))


def _tuple(values: list[str]) -> str:
    """Return Python text that assigns `values` to variables and returns them as a tuple."""
    names = [f"x{n}" for n in range(len(values))]
    lines = [f"    {name} = {value}\n" for name, value in zip(names, values, strict=True)]
    return "".join(lines) + f"    return ({', '.join(names)},)\n"


def fragment_functions(kernel: Kernel, blocks: int, n: int, *, by_row: bool) -> SimpleNamespace:
    """Return an object with functions that a kernel applies to a fragment of scores.

    The fragment has 16 `blocks` rows and `n` columns. Rows are queries if `by_row` is true, and
    keys if not. All functions take the kernel's arguments `a`, batch entry b, head h, and
    fragments. All functions also take the warp's first query and key, and the last existing query
    and key. Positions past the last query or key are replaced by the last one.

    The result has the attributes ``has_mask``, ``has_score`` and ``varlen``, and these functions:

    - ``mask(a, b, h, s, ...) -> s`` sets masked scores to -inf.
    - ``keep(a, b, h, p, ...) -> p`` sets masked elements of p to 0.
    - ``score(a, b, h, s, ...) -> s`` applies the score function.
    - ``alive(t, p) -> p`` sets elements of p to 0 where the score in t is -inf.
    - ``slope(a, b, h, s, ds, ...) -> ds`` returns the gradient of the score function's input s, and
      adds up captured arrays' gradients. ``slope_alone`` does not add up captured arrays'
      gradients.
    """
    of = kernel.functions
    mask, score = (None, None) if of is None else of.graphs
    found = SimpleNamespace(has_mask=mask is not None, has_score=score is not None)
    found.starts = 0 if of is None else of.captured_bytes // 8
    found.varlen = bool(dict(kernel.constants).get("FS_VARLEN")) and of is not None
    for name in ("mask", "keep", "score", "alive", "slope", "slope_alone"):
        setattr(found, name, None)
    places = []
    for _, i, c, x in elements(blocks, n):
        row, column = 16 * i + x // 2 * 8, 8 * c + x % 2
        q, k = (row, column) if by_row else (column, row)
        places.append(f"b, h, min(i0 + {q}, last_query), min(j0 + {k}, last_key)")
    across, down = "lane % 4 * 2", "lane // 4"
    q, k = (down, across) if by_row else (across, down)

    def over(fragments: str, element: str, **names: Any) -> Any:
        """Return a function that applies the generated code of one element to a fragment."""
        values = [element.format(n=n, at=at) for n, at in enumerate(places)]
        text = f"def made(a, b, h, {fragments}, query, key, last_query, last_key):\n"
        text += "    lane = I(cuda.threadIdx.x) % 32\n"
        text += f"    i0, j0 = query + {q}, key + {k}\n"
        return _device(text + _tuple(values), **names)

    if mask is not None:
        one = _keep(mask, 0 if score is None else len(score.arrays))
        found.mask = over("s", "s[{n}] if keep(a, {at}) else F(-math.inf)", keep=one)
        found.keep = over("s", "s[{n}] if keep(a, {at}) else F(0)", keep=one)
    if score is not None:
        arrays = len(score.arrays) + (0 if mask is None else len(mask.arrays))
        found.score = over("s", "score(a, s[{n}], {at})", score=_score(score))
        alive = [f"p[{n}] if t[{n}] > -math.inf else F(0)" for n in range(len(places))]
        found.alive = _device("def made(t, p):\n" + _tuple(alive))
        element = "(slope(a, s[{n}], ds[{n}], {at}){cap} if ds[{n}] != F(0) else F(0))"
        capped = " * (F(1) - (s[{n}] / a.softcap) * (s[{n}] / a.softcap))"
        cap = capped if dict(kernel.constants)["FS_SOFTCAP"] else ""
        for name, wanted in (("slope", of.wanted if of else ()), ("slope_alone", ())):
            one = _slope(score, wanted, arrays)
            setattr(found, name, over("s, ds", element.replace("{cap}", cap), slope=one))
    return found


def first_rows_of(word: int) -> Any:
    """Return ``first_rows(a, outer)``, the first query and key of an outer tile's packed sequence.

    The 64-bit number `word` after `launch.ARGS` is the address of a table with this pair for each
    tile.
    """
    text = f"def made(a, outer):\n    at = a.word_{word}\n"
    text += "    return read(at, I32(2 * outer)), read(at, I32(2 * outer + 1))\n"
    return _device(text, read=read_int, I32=types.int32)
