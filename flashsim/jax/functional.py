"""`attention`: the attention function that JAX models call, with a gradient, under jit and vmap."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashsim.api import inputs, scales
from flashsim.api.dispatch import backend_name
from flashsim.errors import DTypeError, ShapeError, UnsupportedError, reject_unknown
from flashsim.functions.graph import ArraySpec, Graph
from flashsim.functions.operations import FLOAT, INT
from flashsim.functions.tracing import Traced, trace_mask, trace_score
from flashsim.jax.foreign import BACKWARD, FORWARD, OFFSETS
from flashsim.problem import checks

ALGORITHMS = ("flash2", "flash2-fused")


class Asked(NamedTuple):
    """The static arguments of an attention call; `functions` has the score and mask graphs."""

    request: inputs.Request
    deterministic: bool | None
    functions: tuple[tuple[str, Graph], ...] = ()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Any = None,
    sinks: Any = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    algorithm: str = "flash2",
    deterministic: bool | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """Return ``softmax(mask(softcap(scale q k^T) + bias)) v``, with a gradient (`jax.custom_vjp`).

    `attention` is an XLA foreign function (`jax.ffi`), which works directly on XLA's memory, both
    eagerly and under `jax.jit`. Under `jax.vmap`, the mapped axis becomes part of the batch. Calls
    with packed sequences, sinks, or score or mask functions run one after another under `jax.vmap`.
    The backward pass needs only the inputs, out and the LSE (one number per row).
    `flashsim.jax.dot_product_attention` has the arguments and the layout of
    `jax.nn.dot_product_attention`.

    Parameters
    ----------
    q : array, (batch, heads, n_q, head_dim); leading axes may be left out
    k, v : array, (batch, kv_heads, n_kv, head_dim) and (batch, kv_heads, n_kv, head_dim_v)
        `heads` must be a multiple of `kv_heads`. Types on the CPU: float64 (with JAX's
        ``jax_enable_x64``), float32, float16 or bfloat16. Types on a GPU: the same except float64.
    causal, window, softcap, scale, bias, sinks, score_mod, mask_mod
        As in `flashsim.run`. `causal` is bottom-right aligned, so a single query sees the whole KV
        cache. The bias, the sinks, and float arrays that `score_mod` captures have gradients. Under
        `jax.jit`, `causal`, `window`, `softcap` and `scale` must be static. Arrays, also captured
        arrays, may be traced.
    cu_seqlens_q, cu_seqlens_k : array or sequence of int, optional
        As in `flashsim.Problem`. Traced offsets are read when the function runs, which waits for
        the device on a GPU.
    algorithm : {"flash2", "flash2-fused"}
    deterministic : bool, optional
        As in `flashsim.Result.backward`.
    backend : str, optional
        "simulator" or "numba" on the CPU, "cupy" or "numba_cuda" on a GPU. Default: "numba" on the
        CPU and "cupy" on a GPU.
    return_lse : bool
        Return ``(out, lse)``. The LSE, (batch, heads, n_q), is also differentiable.

    Returns
    -------
    jax.Array, shaped like q with v's head_dim

    Raises
    ------
    FlashSimError
        While the function is traced, if an argument is wrong. Errors that only the engine detects
        are raised at run time, as a `jax.errors.JaxRuntimeError` with the same text.
    """
    if unknown:
        reject_unknown(unknown, attention.__kwdefaults__ or (), "attention")
    key: tuple[Any, ...] = ()
    if bias is sinks is score_mod is mask_mod is cu_seqlens_q is cu_seqlens_k is None:
        options = causal, window, softcap, scale, algorithm, deterministic, backend, return_lse
        key = _key(q, k, v, options)
        known = _CHECKED.get(key) if key else None
        if known is not None:
            return known(q, k, v)
    refuse_traced(causal=causal, window=window, softcap=softcap, scale=scale)
    refuse_traced(return_lse=return_lse, deterministic=deterministic)
    if algorithm not in ALGORITHMS:
        raise UnsupportedError(
            f"flashsim.jax.attention supports {' and '.join(ALGORITHMS)}, not {algorithm!r}; use "
            "flashsim.run to simulate other algorithms"
        )
    if backend is not None:
        backend = backend_name(backend)
    if deterministic is not None:
        deterministic = checks.flag("deterministic", deterministic)
    return_lse = checks.flag("return_lse", return_lse)
    q, k, v = taken("q", q), taken("k", k), taken("v", v)
    scales.refuse(q.dtype.name, "flashsim.jax.attention")
    bias = None if bias is None else taken("bias", bias)
    offsets = {"cu_seqlens_q": _known(cu_seqlens_q), "cu_seqlens_k": _known(cu_seqlens_k)}
    traced = {name: x for name, x in offsets.items() if isinstance(x, jax.core.Tracer)}
    of_q, of_k = (None if name in traced else x for name, x in offsets.items())
    request = inputs.Request(causal, window, softcap, scale, None, None, of_q, of_k, algorithm)
    functions, captured = _traced(score_mod, mask_mod)
    asked = request._replace(score_mod=functions.get("score_mod"))
    given = inputs.prepare(q, k, v, asked, bias=bias, may_be_empty=True, on_cpu=False)
    p = given.problem
    if p.score_mod is None:  # a function that only caps the scores became the softcap
        functions.pop("score_mod", None)
    checked = {
        name: getattr(p, name) for name in ("causal", "window", "softcap", "scale", *OFFSETS)
    }
    request = request._replace(backend=backend or "", **checked)
    graphs = tuple((name, x.graph) for name, x in functions.items())
    question = Asked(request, deterministic, graphs)
    if key and given.ndim == 4 and not given.empty:
        if len(_CHECKED) >= _MOST:
            _CHECKED.clear()
        _CHECKED[key] = _jitted(question, return_lse)
    operands = {"q": given.q, "k": given.k, "v": given.v, **traced}
    if given.bias is not None:
        operands["bias"] = given.bias
    if sinks is not None:
        operands["sinks"] = _sinks(sinks, p.heads, p.compute_dtype)
    operands |= captured
    axes = _axes(operands)
    if given.empty:
        out, lse = (_spread(x, axes) for x in _of_nothing(given.q, given.v))
    else:
        spread = {name: _spread(x, axes) for name, x in operands.items()}
        out, lse = _attention(question, return_lse, spread)
    out, lse = (x.reshape(x.shape[4 - given.ndim :]) for x in (out, lse))
    return (out, lse) if return_lse else out


def _traced(score: Any, mask: Any) -> tuple[dict[str, Traced], dict[str, jax.Array]]:
    """Return the traced functions of a call, and a dict of the arrays that they capture."""
    made = {
        **({} if score is None else {"score_mod": trace_score(score)}),
        **({} if mask is None else {"mask_mod": trace_mask(mask)}),
    }
    return made, {
        f"{name} {n}": _operand(x, spec)
        for name, f in made.items()
        for n, (x, spec) in enumerate(zip(f.arrays, f.graph.arrays, strict=True))
    }


def _operand(x: Any, spec: ArraySpec) -> jax.Array:
    """Return a captured array as a JAX array; raise DTypeError if integers lose high bits."""
    operand = jnp.asarray(x)
    kept = isinstance(x, jax.Array) or spec.kind != INT
    if not kept and np.any(np.asarray(x) != np.asarray(operand)):
        raise DTypeError(
            f"the captured array {spec.name} of {x.dtype} has integers that do not fit in JAX's "
            f"{operand.dtype}; use smaller integers, or set jax_enable_x64"
        )
    return operand


def _sinks(sinks: Any, heads: int, wide: str) -> jax.Array:
    """Check attention sinks; return them in the type in which scores are computed."""
    sinks = taken("sinks", sinks)
    if sinks.shape != (heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ShapeError(
            f"sinks must be one number per query head, a float array of shape ({heads},), got "
            f"{sinks.dtype} of shape {sinks.shape}"
        )
    return sinks.astype(wide)


#: Compiled functions of eager calls that were checked, by all arguments that the checks depend on.
_CHECKED: dict[tuple[Any, ...], Callable[..., Any]] = {}
_MOST = 1024
#: Classes of concrete arrays (not tracers) that calls have used so far.
_CONCRETE: set[type] = set()


def _key(q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the cache key of an eager call, or () if an argument is a tracer or has no hash.

    The key includes the options' types, because True equals 1.
    """
    for x in (q, k, v):
        if type(x) not in _CONCRETE:
            if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
                return ()
            _CONCRETE.add(type(x))
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, options, *map(type, options))
    try:
        hash(key)
    except TypeError:
        return ()
    return key


def taken(name: str, x: Any) -> jax.Array:
    """Return a JAX or NumPy array as a JAX array; raise DTypeError for anything else."""
    if type(x) is not np.ndarray and not isinstance(x, jax.Array):
        raise DTypeError(
            f"{name} must be a jax.Array or a numpy.ndarray, got {type(x).__module__}."
            f"{type(x).__name__}; convert it, or use flashsim.run, which accepts other arrays"
        )
    return jnp.asarray(x)


def refuse_traced(**options: Any) -> None:
    """Raise DTypeError for the first of a call's static options that is a tracer of JAX."""
    for name, value in options.items():
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
            raise DTypeError(
                f"{name}= must be a Python value, got a value that JAX traces; pass {name!r} in "
                "static_argnames= of jax.jit"
            )


def _axes(operands: dict[str, Any]) -> frozenset[Any]:
    """Return the mesh axes of `jax.shard_map` over which any operand varies."""
    return frozenset().union(*map(_varies, operands.values()))


def _varies(x: Any) -> frozenset[Any]:
    """Return the `jax.shard_map` axes over which `x` varies."""
    return jax.typeof(x).manual_axis_type.varying


def _spread(x: Any, axes: frozenset[Any]) -> Any:
    """Mark `x` as varying over `axes`; the gradient of `x` is summed over the added axes."""
    missing = tuple(axes - _varies(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _known(offsets: Any) -> Any:
    """Return 1-D offsets of sequences as a tuple; None, tracers and wrong values stay unchanged."""
    if offsets is None or isinstance(offsets, jax.core.Tracer):
        return offsets
    try:
        known = np.asarray(offsets)
    except (TypeError, ValueError):  # ragged lists, lists of tracers
        return offsets
    return tuple(known.tolist()) if known.ndim == 1 else offsets


def _call(
    target: str, question: Asked, operands: dict[str, Any], results: Sequence[Any]
) -> Sequence[Any]:
    """Call one of the foreign functions of `flashsim.jax.foreign` through XLA."""
    request, deterministic, graphs = question
    alone = "sinks" in operands or bool(graphs)
    alone |= any(name in operands or getattr(request, name) is not None for name in OFFSETS)
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results],
        vmap_method="sequential" if alone else "expand_dims",
    )
    static = request._asdict() | {"deterministic": deterministic, "operands": [*operands]}
    static["functions"] = {name: json.dumps(graph.entry()) for name, graph in graphs}
    found = call(*operands.values(), question=json.dumps(static))
    axes = _axes(operands)
    return [_spread(x, axes) for x in found]


def _results(q: Any, v: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Return the shapes and types of out and LSE."""
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    return [((*q.shape[:-1], v.shape[-1]), q.dtype), (q.shape[:-1], wide)]


def _of_nothing(q: Any, v: Any) -> tuple[Any, Any]:
    """Return out and LSE of an empty problem, for which XLA does not call the foreign function."""
    (shape, dtype), (rows, wide) = _results(q, v)
    return jnp.zeros(shape, dtype), jnp.full(rows, -jnp.inf, wide)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(question: Asked, gives_lse: bool, operands: dict[str, Any]) -> tuple[Any, Any]:
    """Return attention's out (batch, heads, n_q, head_dim_v) and LSE (batch, heads, n_q).

    With `gives_lse` False, the user gets no LSE, and the backward pass ignores the LSE's gradient.
    """
    results = _results(operands["q"], operands["v"])
    out, lse = _call(FORWARD, question, operands, results)
    return out, lse


def _keep(question: Asked, gives_lse: bool, operands: dict[str, Any]) -> tuple[Any, Any]:
    """Run the forward pass; return the results, and the backward pass's inputs, out and LSE."""
    out, lse = _attention(question, gives_lse, operands)
    return (out, lse), (operands, out, lse)


def _pull_back(
    question: Asked, gives_lse: bool, kept: Any, cotangents: Any
) -> tuple[dict[str, Any]]:
    operands, out, lse = kept
    dout, dlse = cotangents
    given = (
        operands | {"out": out, "lse": lse, "dout": dout} | ({"dlse": dlse} if gives_lse else {})
    )
    return (_gradients(question, given),)


_attention.defvjp(_keep, _pull_back)


@lru_cache(maxsize=_MOST)
def _jitted(question: Asked, gives_lse: bool) -> Callable[..., Any]:
    """Return a compiled function for eager calls; tracing each call would take 20 times as long."""

    def run(q: Any, k: Any, v: Any) -> Any:
        out, lse = _attention(question, gives_lse, {"q": q, "k": k, "v": v})
        return (out, lse) if gives_lse else out

    return jax.jit(run)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(question: Asked, operands: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients of all inputs; the gradient of an integer input is None."""
    graph = dict(question.functions).get("score_mod")
    captured = () if graph is None else graph.arrays
    score = [f"score_mod {n}" for n, spec in enumerate(captured) if spec.kind == FLOAT]
    names = [name for name in ("q", "k", "v", "bias", "sinks", *score) if name in operands]
    results = [(operands[name].shape, operands[name].dtype) for name in names]
    found = dict(zip(names, _call(BACKWARD, question, operands, results), strict=True))
    others = operands.keys() - found.keys() - {"out", "lse", "dout", "dlse"}
    return found | dict.fromkeys(others)


@_gradients.defjvp
def _no_second(*_: Any) -> Any:
    raise UnsupportedError(
        "flashsim's attention cannot be differentiated twice, because its backward kernel has no "
        "gradient; use jax.nn.dot_product_attention for second derivatives"
    )
