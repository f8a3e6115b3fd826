"""Operations on one panel of bfloat16 pairs, by the names and arguments that kernels use.

A *pair* is two neighbouring bfloat16 numbers in 32 bits, the first in the lower half. Each term of
a matrix product's sum is a dot product of two pairs. A row of the left operand holds pairs side by
side, as a tensor's row does. A row of the right operand holds one pair per lane, merged from two
rows of numbers. Lanes are queries (forward, dQ) or keys (dK, dV). So two rounded rows of P, merged,
form a row of the next right operand without shuffles.

A product's rows and pairs are multiples of `amx_tiles.SIDE`, and lanes are a multiple of 2 `SIDE`.
`copy_pairs` and `transpose_*` copy multiples of `SIDE` rows, pairs and columns. Only CPUs with
instructions for pairs (`Blocking.pairs`) call these operations, so there is only vector or AMX
code. Tests compare it with NumPy.
"""

from flashsim.engines.cpu.bf16_dot import codegen
from flashsim.engines.cpu.bf16_dot.amx_tiles import build_configure, build_release
from flashsim.engines.cpu.micro_kernels.vector import operation


@operation("a o0 i a a a o1,2,3 a a o5", codegen.build_pair_softmax)
def online_softmax_pairs(cpu, S, s0, rows, m, l, alpha, at, factor, P, p0):
    """Run one online-softmax step on ``factor[0] S``, and store rows of P, two at a time, as pairs.

    If a lane has a score above m, m becomes the lane's largest score plus `exponential.SLACK`;
    otherwise m stays, and alpha is 1. So P = e^(factor S - m) is at most 1. The factor of S must be
    at least 0. If P has an odd number of rows, the last row is paired with zeros. The sum `l` adds
    unrounded elements of P. If a lane has seen no key, or only scores that count as masked, 0
    replaces m, as in `plain.online_softmax`.
    """


@operation("a o0 i i a o1", codegen.build_pairs_of_rows)
def pairs_of_rows(cpu, X, x0, ld, rows, P, p0):
    """Round a panel to bfloat16, and merge every two rows into a right operand's row."""


@operation("a o0 i i a o1 i", codegen.build_pairs_of_lanes)
def pairs_of_lanes(cpu, X, x0, ld, rows, P, p0, row):
    """Round a panel to bfloat16, and merge neighbouring lanes into a left operand's pairs."""


@operation("a o0 i i a", codegen.build_scale, by_lane=False)
def scale_panel(cpu, X, x0, ld, rows, factor):
    """Multiply all elements of the panel X by ``factor[0]``, in place."""


@operation("a o0 i i a o1", codegen.build_scale, by_lane=True)
def scale_lanes(cpu, X, x0, ld, rows, factors, f0):
    """Multiply each lane of the panel X by the factor of this lane, in place."""


@operation("a o0 a o1 i i a", codegen.build_add_scaled)
def add_scaled(cpu, Y, y0, X, x0, ld, rows, factor):
    """Add ``factor[0]`` times panel X to panel Y."""


@operation("a o0 i a o1 i i", codegen.build_copy_pairs)
def copy_pairs(cpu, out, o0, row, X, x0, rows, pairs):
    """Copy rows of X, in which every two neighbouring numbers form a bfloat16 pair."""


@operation("a o0 i a o1 i i i", codegen.build_transpose_columns)
def transpose_columns(cpu, out, o0, row, X, x0, d, pairs, columns):
    """Copy columns of X to rows of `out`; two neighbours in a column form a bfloat16 pair."""


@operation("a o0 a o1 i i i", codegen.build_transpose_rows)
def transpose_rows(cpu, out, o0, X, x0, d, rows, pairs):
    """Copy rows of X to lanes of `out`; two neighbours in a row of X form a bfloat16 pair."""


@operation("a o0 a o1 i a o2 i i", codegen.build_transpose_panel)
def transpose_panel(cpu, panel, p0, X, x0, d, factors, f0, rows, columns):
    """Write lanes of a panel to rows of X, each times a factor and rounded to bfloat16."""


@operation("a", build_configure)
def begin_tiles(cpu, any_array):
    """Configure a thread's AMX tiles before the first matrix product; without AMX, do nothing."""


@operation("a", build_release)
def end_tiles(cpu, any_array):
    """Release a thread's AMX tiles after the last matrix product; without AMX, do nothing."""
