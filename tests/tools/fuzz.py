"""Random problems with their own oracle and transfer counter, which share nothing with flashsim.

`draw(rng)` returns a `Case`, whose plain values print as code. `check(case)` runs it. It raises
`AssertionError` unless results are right by flash-attention's rule (error at most twice plain
attention's, plus one rounding), and unless the bytes and products of trace and closed form equal
those counted here, tile by tile. `mutate(rng)` spoils a good case, which must then raise a
`FlashSimError`.

Only flashsim's public names are used. `fuzz_cases` has the cases, `fuzz_oracle` the true results,
and `fuzz_counter` the bytes.
"""

import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from fuzz_cases import ALGORITHMS, MASKS, Case, arrays, block_grid, draw, laid
from fuzz_counter import Moves, count
from fuzz_oracle import error_of, judged

import flashsim

__all__ = ["ALGORITHMS", "Case", "check", "code", "draw", "draw_spoilt", "spoil"]


# -- running a case -----------------------------------------------------------------------------


def keywords(case: Case) -> dict[str, Any]:
    """Return the keywords of `run`, besides the arrays."""
    options: dict[str, Any] = {
        name: getattr(case, name)
        for name in ("backend", "algorithm", "causal", "window", "softcap", "scale", "key_order")
    }
    if case.cu_q is not None:
        options |= {"cu_seqlens_q": case.cu_q, "cu_seqlens_k": case.cu_k}
    if case.block is not None:
        options["block_mask"] = flashsim.BlockMask(block_grid(case), *case.block[:2])
    if case.mask is not None:
        options["mask"] = MASKS[case.mask]
    if case.tiling is not None:
        options["tiling"] = flashsim.Tiling(*case.tiling)
    for name in ("threads", "micro_kernel"):
        if getattr(case, name) is not None:
            options[name] = getattr(case, name)
    return options


def check(case: Case) -> None:
    """Run forward and backward; raise AssertionError unless all is right."""
    x = arrays(case)
    given = {
        name: laid(a, case.layout).reshape(a.shape[4 - case.ndim :])
        for name, a in x.items()
        if name != "bias"
    }
    bias = laid(x["bias"], case.layout) if "bias" in x else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = flashsim.run(
            given["q"], given["k"], given["v"], bias=bias, trace=True, **keywords(case)
        )
        tiling = case.tiling_backward and flashsim.Tiling(*case.tiling_backward)
        grads = result.backward(given["dout"], tiling=tiling, deterministic=case.deterministic)
    got = {"out": result.out, "lse": result.lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    if bias is not None:
        got["dbias"] = grads.dbias
    form = case.algorithm
    if case.deterministic is not None:
        form = "flash2" if case.deterministic else "flash2-fused"
    for trace, algorithm in ((result.trace, case.algorithm), (grads.trace, form)):
        moved, products = count(case, trace.tiling, trace.direction, algorithm)
        predicted = trace.predicted()
        for what, other in (("trace", trace), ("closed form", predicted)):
            theirs: Moves = Counter()
            for (_, op, tensor), nbytes in other.transfers.items():
                theirs[op, tensor] += nbytes
            assert +theirs == moved, f"{trace.direction}, {what}: {+theirs - moved} too much"
            assert other.flops("matmul") == products, f"{trace.direction}, {what}: FLOPs"
    _check_errors(case, x, got)


def _check_errors(case: Case, x: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    exact, may = judged(case, x)
    errors = {}
    for name, value in got.items():
        true = exact[name]
        assert np.asarray(value).size == true.size, f"{name} has shape {np.shape(value)}"
        errors[name] = error_of(np.reshape(value, true.shape), true)
    wrong = {name for name in errors if not errors[name] <= may[name]}
    # if plain attention was unusually exact for this draw, the worst of other draws decides
    if wrong:
        for seed in range(16):
            other = replace(case, seed=case.seed + 1000 + seed)
            more = judged(other, {**arrays(other), **({"bias": x["bias"]} if "bias" in x else {})})
            may = {name: max(may[name], more[1][name]) for name in may}
        wrong = {name for name in wrong if not errors[name] <= may[name]}
    assert not wrong, ", ".join(f"{n}: error {errors[n]:.3g}, may be {may[n]:.3g}" for n in wrong)


# -- spoilt calls -------------------------------------------------------------------------------


class Odd:
    """An object that no argument accepts."""


#: Values that replace a good argument, as code. Some are valid for some arguments: then the call
#: runs.
ODD_VALUES = (
    *("None", "Odd()", "'x'", "b'x'", "True", "-1", "0", "2.5", "float('nan')", "float('inf')"),
    *("10**400", "2**63", "1j", "[]", "{}", "[[1], [2, 3]]", "(1, 2, 3)", "(-5, 1)", "(1.5, 2)"),
    *("np.zeros(0)", "np.zeros((2, 3), np.float32)", "np.zeros((1,) * 5, np.float32)"),
    *("np.array([None, 'x'], object)", "np.array(['x'])", "np.zeros((1, 1, 2, 2), complex)"),
    *(
        "np.zeros((1, 1, 2, 2), bool)",
        "np.zeros((1, 1, 2, 2), int)",
        "np.zeros((1, 1, 2, 2), '>f4')",
    ),
    *("_raises", "lambda q, k: None", "lambda q, k: 'yes'", "float"),
    *("flashsim.Tiling(1, 1)", "flashsim.Device.get('T4')"),
)
ARGUMENTS = (
    *("q", "k", "v", "bias", "dout", "algorithm", "causal", "window", "softcap", "scale", "mask"),
    *("block_mask", "cu_seqlens_q", "cu_seqlens_k", "tiling", "device", "backend", "key_order"),
    *("nan_policy", "trace", "threads", "micro_kernel", "deterministic", "tiling (backward)"),
    *("trace (backward)", "no such argument"),
)


def _raises(*_: Any) -> None:
    raise RuntimeError("a mask that fails")


def draw_spoilt(rng: np.random.Generator, backend: str | None = None) -> tuple[Case, str, str]:
    """Return a case, the argument that is spoilt, and the name of its bad value."""
    case = draw(rng, backend)
    argument = ARGUMENTS[rng.integers(len(ARGUMENTS))]
    return case, argument, ODD_VALUES[rng.integers(len(ODD_VALUES))]


def spoil(case: Case, argument: str, value: str) -> bool:
    """Call with a bad argument; raise AssertionError unless it is refused, or runs.

    Returns whether it was refused.
    """
    x = arrays(case)
    odd = eval(value)
    forward = {**{n: x[n] for n in "qkv"}, "bias": x.get("bias"), **keywords(case)}
    backward = {
        "dout": x["dout"],
        "tiling": case.tiling_backward and flashsim.Tiling(*case.tiling_backward),
        "deterministic": case.deterministic,
    }
    if argument in backward and argument != "tiling":
        backward[argument] = odd
    elif argument.endswith(" (backward)"):
        backward[argument.removesuffix(" (backward)")] = odd
    else:
        forward[argument] = odd
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flashsim.run(**forward).backward(**backward)
    except flashsim.FlashSimError:
        return True
    except MemoryError:
        raise
    except Exception as error:
        raise AssertionError(f"{argument} = {value}: {type(error).__name__}: {error}") from error
    return False


# -- reproducing --------------------------------------------------------------------------------


def code(case: Case, *spoilt: str) -> str:
    """Return Python code that runs a case again, in the folder of this module."""
    shown = {
        name: value
        for name, value in vars(case).items()
        if name == "seed" or value != Case.__dataclass_fields__[name].default
    }
    text = ", ".join(f"{name}={value!r}" for name, value in shown.items())
    call = "spoil" if spoilt else "check"
    return f"from fuzz import *\n{call}({', '.join([f'Case({text})', *map(repr, spoilt)])})"
