"""`Precision`: the types to which an algorithm rounds its intermediate results.

A rounding point is a named intermediate result that a kernel could store in fewer bits. Most
published kernels round only P and dS to the inputs' type, before matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from flashsim import report
from flashsim.errors import OptionError, own_errors
from flashsim.problem import checks
from flashsim.problem.problem import Problem, numpy_dtype

#: Operand types of products by name. Each has a power of two by which operands are multiplied
#: before they are rounded, and divided afterwards.
Operands = Mapping[str, tuple[str, float]]
_NONE: Mapping[str, Any] = MappingProxyType({})

#: P = exp(S - m) is at most 1. FlashAttention-3 multiplies it by 2**8 (`Max_offset` in its
#: hopper/flash_fwd_kernel_sm90.h), so that e4m3, whose smallest number is 2**-9, represents P down
#: to 2**-17. P is e4m3 for both FP8 input types: with that factor, P lies where e4m3 has one bit
#: more than e5m2. FlashAttention-3 supports only e4m3 (hopper/flash_api.cpp).
P_FACTOR, P_OF_FP8 = 256.0, "float8_e4m3fn"

#: How products are summed: in float32, or as Hopper's tensor cores sum products of FP8 operands.
ACCUMULATORS = ("float32", "hopper-fp8")
#: The rounding points of each algorithm, as `Precision` names them.
_STANDARD = ("inputs", "s", "p", "o", "ds", "dq", "dkv")
_FLASH2 = ("inputs", "s", "p", "m", "l", "o", "lse", "delta", "ds", "dq", "dkv")
POINTS = {
    "standard": _STANDARD,
    "flash1": ("inputs", "s", "p", "o_hbm", "l_hbm", "m_hbm", "ds", "dq", "dkv"),
    "flash2": _FLASH2,
    "flash2-fused": _FLASH2,
    "flash2-fused-first": _FLASH2,
    "flash2-once": tuple(point for point in _FLASH2 if point != "delta"),  # delta stays on chip
    "flash-decode": ("inputs", "s", "p", "m", "l", "o", "lse"),
}


def points_of(algorithm: str) -> tuple[str, ...]:
    """Return an algorithm's rounding points, or only "inputs" if `POINTS` lacks the algorithm."""
    return POINTS.get(algorithm, ("inputs",))


def round_to(x: np.ndarray, dtype: str, factor: float = 1.0) -> np.ndarray:
    """Round `x * factor` to a type, and return the result divided by the factor.

    The factor is a power of two, so the division is exact. In a type without infinity
    (float8_e4m3fn), a value that is too large becomes NaN, as in `ml_dtypes`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if factor == 1.0:
            return x.astype(numpy_dtype(dtype)).astype(x.dtype)
        return (x * x.dtype.type(factor)).astype(numpy_dtype(dtype)).astype(x.dtype) / factor


@own_errors
@dataclass(frozen=True)
class Precision:
    """The types to which an algorithm rounds intermediate results (at rounding points).

    None means the usual type of a rounding point. A `Precision` changes numbers, not the bytes
    moved, so a run with a `Precision` has no trace.

    Attributes
    ----------
    inputs : str, optional
        q, k, v and dout, as loaded from HBM.
    s : str, optional
        Scores, scaled and masked, before the softmax.
    p, ds : str, optional
        P and dS as operands of their products. Default: the inputs' type; with FP8 inputs
        float8_e4m3fn forward and bfloat16 backward.
    m, l, o : str, optional
        Running row maximum, row sum and output, rounded after each visit (one pair of tiles).
    lse, delta : str, optional
        The LSE that the backward pass reads; delta = rowsum(dO o O).
    dq, dkv : str, optional
        The gradients' accumulators, rounded after each visit.
    o_hbm, l_hbm, m_hbm : str, optional
        FlashAttention-1's O, l and m in HBM between visits.
    accumulator : {"float32", "hopper-fp8"}
        How Q K^T and P V are summed in the forward pass (see `tensor_core_sum`).
    flush : int, optional
        Only with "hopper-fp8": after this many key tiles, the sum of P V is added to a float32
        accumulator and restarts from 0. Default: never; P V is summed in O itself.
    """

    inputs: str | None = None
    s: str | None = None
    p: str | None = None
    ds: str | None = None
    m: str | None = None
    l: str | None = None  # the papers' name
    o: str | None = None
    lse: str | None = None
    delta: str | None = None
    dq: str | None = None
    dkv: str | None = None
    o_hbm: str | None = None
    l_hbm: str | None = None
    m_hbm: str | None = None
    accumulator: str = "float32"
    flush: int | None = None

    __repr__ = report.short
    _repr_html_ = report.card

    def __post_init__(self) -> None:
        for point in fields(self)[:-2]:
            if (value := getattr(self, point.name)) is not None:
                object.__setattr__(self, point.name, checks.dtype_name(value))
        checks.one_of("accumulator", self.accumulator, ACCUMULATORS)
        if self.flush is not None:
            checks.positive_int("flush", self.flush)
            if self.accumulator == "float32":
                raise OptionError(
                    "flush= sets how often a tensor core's sum is added to a float32 sum, so it "
                    f"needs accumulator='hopper-fp8', got accumulator={self.accumulator!r}"
                )

    @property
    def points(self) -> dict[str, str]:
        """A dict from rounding point to type, for each rounding point with a type."""
        every = {point.name: getattr(self, point.name) for point in fields(self)[:-2]}
        return {name: dtype for name, dtype in every.items() if dtype is not None}

    def check(self, algorithm: str) -> None:
        """Raise `OptionError` if a rounding point is set that the algorithm does not have."""
        for name in self.points:
            if name not in points_of(algorithm):
                raise OptionError(
                    f"{algorithm!r} has no rounding point {name!r}; choose from "
                    f"{', '.join(points_of(algorithm))}"
                )

    @classmethod
    def preset(cls, name: str, dtype: str = "bfloat16") -> Precision:
        """Return a published kernel's rounding types, for inputs of the 16-bit type `dtype`.

        Raises
        ------
        OptionError
            If the preset is unknown.
        """
        checks.one_of("precision preset", name, PRESETS)
        checks.one_of("dtype", dtype, ("float16", "bfloat16"))
        precision = PRESETS[name][0]
        types: dict[str, Any] = {n: dtype for n, x in precision.points.items() if x == "float16"}
        return replace(precision, **types)


#: No changes: every rounding point keeps the algorithm's own type.
USUAL = Precision()

#: Published kernels: the types of their rounding points ("float16" means the inputs' type), and the
#: source.
PRESETS: dict[str, tuple[Precision, str]] = {
    "standard": (
        Precision(inputs="float16", s="float16", p="float16", ds="float16"),
        "arXiv:2407.08608, section 4.3: S and P of plain attention pass through HBM in the inputs' "
        "type; products are summed in float32",
    ),
    "flash-attention-1": (
        Precision(inputs="float16", p="float16", ds="float16"),
        "github.com/Dao-AILab/flash-attention v1, csrc/flash_attn/src/fmha_fprop_kernel_1xN.h: P "
        "is packed to 16 bits; O between visits (o_tmp) is float32, and so is the LSE, which "
        "replaces m and l",
    ),
    "flash-attention-2": (
        Precision(inputs="float16", p="float16", ds="float16"),
        "github.com/Dao-AILab/flash-attention v2, csrc/flash_attn/src/flash_fwd_kernel.h and "
        "flash_bwd_kernel.h: P and dS are converted to Element; accumulators, the softmax, LSE, "
        "rowsum(dO o O) and dQ's accumulator are float",
    ),
    "flash-attention-3": (
        Precision(inputs="float16", p="float16", ds="float16"),
        "arXiv:2407.08608, section 4.3: intermediate results of the softmax are kept in float32",
    ),
    "flash-attention-3-fp8": (
        Precision(inputs="float8_e4m3fn", p="float8_e4m3fn", accumulator="hopper-fp8"),
        "arXiv:2407.08608, section 3.3, and hopper/flash_fwd_kernel_sm90.h (Max_offset); the "
        "accumulator: DeepSeek-V3, arXiv:2412.19437, section 3.5.2. Scales: `flashsim.quantize`",
    ),
}


class Roundings(NamedTuple):
    """The types to which one stage (kernel) rounds its tensors, by the papers' tensor names.

    Tensors in `operands` are rounded when computed, or when they enter a product. Accumulators in
    `held` are rounded at the end of each visit. Tensors in `stored` are rounded when they are
    stored or added in HBM. `tensor_cores` says whether products are summed as on Hopper's FP8
    tensor cores.
    """

    operands: Operands = _NONE
    held: Mapping[str, str] = _NONE
    stored: Mapping[str, str] = _NONE
    tensor_cores: bool = False
    flush: int | None = None

    @classmethod
    @lru_cache(maxsize=64)
    def of(
        cls, problem: Problem, algorithm: str, direction: str, stage: str, precision: Precision
    ) -> Roundings:
        """Return the types to which one stage (kernel) of a pass rounds its tensors."""
        p, forward = problem, direction == "forward"
        points = precision.points
        types = _usual(p, forward) | {
            name: points[point]
            for name, point in (("P", "p"), ("dS", "ds"), ("S", "s"), ("m", "m"))
            if point in points
        }
        operands = {
            name: (dtype, P_FACTOR if name == "P" and dtype in checks.FP8 else 1.0)
            for name, dtype in types.items()
            if dtype != p.compute_dtype
        }
        held = {"O": "o", "l": "l", "dQ": "dq", "dK": "dkv", "dV": "dkv"}
        stored = {"L": "lse", "L_part": "lse", "delta": "delta"}
        if algorithm == "flash1":
            stored |= {"O": "o_hbm", "O_acc": "o_hbm", "l": "l_hbm", "m": "m_hbm"}
        if stage in ("softmax", "ds"):
            stored |= {"P": "p", "dS": "ds"}
        if stage == "fused" or (algorithm, stage) == ("flash1", "backward"):
            stored |= {"dQ": "dq", "dQ_acc": "dq"}
        held, stored = (
            {name: points[point] for name, point in names.items() if point in points}
            for names in (held, stored)
        )
        cores = forward and precision.accumulator == "hopper-fp8"
        return cls(operands, held, stored, cores, precision.flush if cores else None)


NO_ROUNDINGS = Roundings()


def _usual(p: Problem, forward: bool) -> dict[str, str]:
    """Return the types to which kernels usually round P and dS: the inputs' type, except for FP8.

    For FP8 inputs, the types are e4m3 (forward) and bfloat16 (backward), because FlashAttention-3
    has no FP8 backward pass.
    """
    if forward:
        return {"P": P_OF_FP8 if p.fp8 else p.dtype}
    return dict.fromkeys(("P", "dS"), p.result_dtype)


#: The number of products that a tensor core sums at once, and the bits it keeps after the leading
#: bit.
TERMS, FRACTION = 32, 13


def tensor_core_sum(into: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """Add ``a @ b`` to `into`, with the rounding of Hopper's tensor cores for FP8 operands.

    A tensor core adds 32 products and the running sum at once. The tensor core shifts each addend
    to the largest exponent, and truncates it to 14 bits: the leading bit and 13 more (DeepSeek-V3,
    arXiv:2412.19437, section 3.5.2). The new sum is also truncated to 14 bits. Truncation rounds
    towards zero, as in older tensor cores (Fasi et al., PeerJ Computer Science 2021). The products
    of FP8 numbers themselves are exact. `a`, `b` and `into` are float32, (.., m, k), (.., k, n),
    (.., m, n).
    """
    for first in range(0, a.shape[-1], TERMS):
        part = slice(first, first + TERMS)
        terms = a[..., part, None] * b[..., None, part, :]
        largest = np.maximum(np.abs(terms).max(axis=-2), np.abs(into))
        unit = _unit(largest)
        terms /= unit[..., None, :]
        total = np.trunc(terms, out=terms).sum(axis=-2) + np.trunc(into / unit)
        total *= unit
        unit = _unit(np.abs(total))
        into[...] = np.trunc(total / unit) * unit


def _unit(size: np.ndarray) -> np.ndarray:
    """Return the value of the last bit that a tensor core keeps in sums of numbers of this size."""
    _, exponent = np.frexp(size)
    return np.ldexp(np.float32(1), np.maximum(exponent - 1 - FRACTION, -126)).astype(np.float32)
