"""Check a call of `run` or `backward`; for a call like an earlier one, reuse the earlier check."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashsim.api import array_libraries, dispatch, inputs, scales
from flashsim.api.arrays import expand, only_dlpack, require_numpy
from flashsim.api.inputs import Request
from flashsim.api.kv_cache import CACHES, check_alike, live_lengths, live_problem
from flashsim.engines.nothing import Nothing
from flashsim.engines.protocol import Engine, Job
from flashsim.errors import (
    BackendUnavailable,
    OptionError,
    UnknownArgumentError,
    UnsupportedError,
    reject_unknown,
)
from flashsim.functions.tracing import Traced
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.precision import Precision
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling

#: Options that may be None, which is the same as leaving them out.
_OR_NONE = {*CACHES, "precision", "pack_gqa"}


@dataclass(frozen=True)
class Checked:
    """A call that passed every check: its job, its engine, and the library of its arrays.

    If the batch, the queries or the keys have size 0, `empty` is True and the engine is `Nothing`.
    """

    engine: Engine
    backend: str
    host: array_libraries.Host
    job: Job
    ndim: int
    bias_shape: tuple[int, ...] | None
    empty: bool = False
    score: Traced | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the object's state without the engine, a module that cannot be pickled."""
        return {name: x for name, x in self.__dict__.items() if name != "engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        engine = dispatch.engine(state["backend"])
        self.__dict__.update(
            state, engine=Nothing(engine, state["score"]) if state["empty"] else engine
        )

    def again(self, request: Request, q: Any, k: Any, v: Any, bias: Any) -> Job:
        """Return a copy of an already checked job, with other arrays of the same shapes and types.

        The new job shares the old job's memo (cached values) unless a bias, a mask or an unchecked
        option can change these values.
        """
        if self.ndim < 4:
            q, k, v = expand(q), expand(k), expand(v)
        plain = bias is None is request.mask is request.block_mask
        if plain and _SEEN_LATER.isdisjoint(self.job.options):
            return self.job.given(q, k, v)
        options = _options(request)
        bias = None if bias is None else expand(bias)
        return self.job.given(q, k, v, bias=bias, options=options, memo={})

    def backward_job(
        self,
        mine: Job,
        saved: Mapping[str, Any],
        tiling: Tiling | None,
        deterministic: bool | None,
        trace: bool | str | None,
        *,
        dlse: bool,
        captured: Sequence[str] = (),
    ) -> Job:
        """Return the `Job` of the backward pass that follows the forward pass `mine`.

        `dlse` is true if the caller passes a gradient of the LSE. `captured` names the captured
        arrays of the score function whose gradients the caller wants; an empty problem has none.
        """
        captured = () if self.empty else tuple(captured)
        form = plans.backward_form(mine.algorithm, deterministic)  # raises if there is none
        if trace is not None:
            trace = inputs.check_trace_mode(trace, self.backend)
        job = replace(
            mine,
            problem=_with(mine.problem, dlse=dlse, score_grads=captured),
            tiling=tiling,
            algorithm=form,
            trace=mine.trace if trace is None else trace,
            memo={},
        )
        if deterministic is None:
            return job

        fastest = getattr(self.engine, "fastest_backward", None)
        if fastest is not None:
            form, ordered = fastest(job, saved, mine.algorithm, deterministic)
            job = replace(job, algorithm=form, deterministic=ordered)
        return job


#: Requests that passed every check; the key is everything that the checks read. The checks take
#: longer than a short call.
_KEPT: dict[tuple[Any, ...], Checked] = {}
_MOST_KEPT = 256
_PLAIN = frozenset({"kernel", "allow_tf32", "threads", "micro_kernel", "pack_gqa"})
#: On a GPU, the checks read only the shape and the type of these.
_SEEN_LATER = frozenset({"cache_seqlens", "block_table", "workspace"})


def ask(request: Request, q: Any, k: Any, v: Any, bias: Any = None) -> tuple[Checked, Job]:
    """Check a call, unless an equal call was checked before; return its `Checked` and `Job`."""
    if request.backend == "numpy":
        request = request._replace(backend="simulator")
    host = array_libraries.ANY
    if request.backend in dispatch.ON_CPU:
        host = array_libraries.NUMPY
        if not type(q) is type(k) is type(v) is np.ndarray or bias is not None:
            host = array_libraries.host_of(q)
            q, k, v, bias = array_libraries.take(host, q=q, k=k, v=v, bias=bias)
    if not request.cu_seqlens_q is request.cu_seqlens_k is None:
        of_q, of_k = map(inputs.offsets, (request.cu_seqlens_q, request.cu_seqlens_k))
        request = request._replace(cu_seqlens_q=of_q, cu_seqlens_k=of_k)
    try:
        key = _key(request, host, q, k, v, bias)
        checked = None if key is None else _KEPT.get(key)
    except (AttributeError, TypeError):  # no array; or a value that has no hash
        key = checked = None
    if checked is not None:
        return checked, checked.again(request, q, k, v, bias)
    checked = _check(request, host, q, k, v, bias)
    if key is not None and not any(map(only_dlpack, (q, k, v))):  # those are adopted each time
        if len(_KEPT) >= _MOST_KEPT:
            _KEPT.clear()
        job = checked.job.given(None, None, None, bias=None)
        _KEPT[key] = replace(checked, job=job)
    return checked, checked.job


def _key(
    request: Request, host: array_libraries.Host, q: Any, k: Any, v: Any, bias: Any
) -> tuple[Any, ...] | None:
    """Return the key under which a call's checks are cached, or None if each call must be checked.

    True and 1 are equal in Python, so the key holds types as well as values.
    """
    if host.library:  # in the CPU's memory
        for x in (q, k, v) if bias is None else (q, k, v, bias):
            if type(x) is not np.ndarray or not x.flags.c_contiguous:
                return None
    elif isinstance(q, np.ndarray) or bias is not None:
        return None
    if request.nan_policy != "propagate":
        return None
    if not request.mask_mod is request.score_mod is request.sinks is None:
        return None  # captured arrays may change between calls
    more: list[Any] = [] if bias is None else [bias.shape, bias.dtype]
    for name, x in request.options:
        if name in _PLAIN:
            more += name, x, type(x)
        elif name in _SEEN_LATER and not host.library:
            more += name, type(x), getattr(x, "shape", None), getattr(x, "dtype", None)
        else:
            return None
    return (
        *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, type(q), type(k), type(v)),
        *(type(request.causal), type(request.window), type(request.softcap)),
        *(type(request.scale), type(request.trace), host.library, *request[:-1], *more),
    )


def _with(problem: Problem, **fields: Any) -> Problem:
    """Return the problem with some fields replaced; if nothing changes, return the same object."""
    same = all(getattr(problem, name) == value for name, value in fields.items())
    return problem if same else replace(problem, **fields)


def _options(request: Request) -> dict[str, Any]:
    return {name: x for name, x in request.options if x is not None or name not in _OR_NONE}


def _check(
    request: Request, host: array_libraries.Host, q: Any, k: Any, v: Any, bias: Any
) -> Checked:
    """Run every check of a call, and return the call as `Checked`."""
    backend, algorithm, options = request.backend, request.algorithm, _options(request)
    engine = dispatch.engine(backend)
    if "precision" in options:
        checks.instance("precision", options["precision"], Precision, "flashsim.Precision")
        if "precision" not in engine.OPTIONS:
            raise UnsupportedError(
                f"backend {backend!r} rounds as its kernels do, so it takes no precision=; use "
                "backend='simulator', or leave out precision="
            )
        options["precision"].check(plans.check_algorithm(algorithm))
    packs = "pack_gqa" in options and checks.flag("pack_gqa", options["pack_gqa"])
    never = () if packs else ("pack_gqa",)  # what an engine that packs no heads does anyway
    unknown = [name for name, _ in request.options if name not in {*engine.OPTIONS, *never}]
    if unknown:
        _refuse_of_other_backends(unknown, backend)
        reject_unknown(unknown, ["bias", *Request._fields[:-1], *engine.OPTIONS], "run")
    plans.check_algorithm(algorithm)
    inputs.check_decoding(algorithm, options)
    inputs.check_tiling(request.tiling)
    on_cpu = backend in dispatch.ON_CPU
    v, latent = inputs.values_in_keys(k, v, options)
    table = options.get("block_table")
    if not on_cpu:
        q, k, v = (adopted(engine, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    elif table is not None:
        table = checks.as_array("block_table", table)
    unsaid, block = options.get("scales") is None, options.pop("scale_block", None)
    scaled = options.pop("scales", None)
    scaled = None if unsaid else scales.said(scaled)
    grains = None
    if scaled is not None or block is not None:
        grains = scales.granularity(scaled, block, len(q.shape), request.tiling)
    prepared = inputs.prepare(
        *(q, k, v, request),
        bias=bias,
        block_table=table,
        latent=latent,
        scales=grains,
        may_be_empty=True,
        on_cpu=on_cpu,
    )
    problem, empty = prepared.problem, prepared.empty
    if problem.fp8 and "scales" not in engine.OPTIONS:
        raise UnsupportedError(
            f"backend {backend!r} does not support {problem.dtype}; use backend='simulator', or "
            "convert q, k and v"
        )
    if problem.fp8 and unsaid:
        scales.require(problem.dtype)
    if not problem.fp8 and not unsaid and scaled is None:
        raise OptionError(
            f"scales={scales.UNSCALED!r} is for FP8 inputs only, but q, k and v are "
            f"{problem.dtype}; leave out scales="
        )
    if problem.scales is not None and not empty:
        options["scales"] = scales.checked(problem, scaled, values=on_cpu)
    if on_cpu:  # on a GPU, the launcher finds the live keys of a cache, once the lengths are known
        require_numpy(backend, q=prepared.q, k=prepared.k, v=prepared.v, bias=prepared.bias)
        cached = not empty and options.keys() & CACHES
        if cached and not any(live_lengths(problem, options)):
            empty = True
        elif cached:
            problem, options = live_problem(problem, options, tuple(k.shape))
            if table is None:
                check_alike(problem.shared_prefix, k=prepared.k, v=prepared.v)
    job = Job(
        *(problem, prepared.q, prepared.k, prepared.v, prepared.bias),
        *(request.tiling, Device.get(request.device), algorithm),
        inputs.check_key_order(request.key_order),
        inputs.check_trace_mode(request.trace, backend),
        options,
        sinks=prepared.sinks,
        score_arrays=prepared.score_arrays,
        mask_arrays=prepared.mask_arrays,
    )
    runs = Nothing(engine, prepared.score) if empty else engine
    bias_shape = None if bias is None else tuple(bias.shape)
    return Checked(runs, backend, host, job, prepared.ndim, bias_shape, empty, prepared.score)


def _refuse_of_other_backends(unknown: Iterable[str], backend: str) -> None:
    """Raise `UnknownArgumentError` if an option is valid only for other installed backends."""
    for name in unknown:
        having = []
        for other in dispatch.BACKENDS:
            with suppress(BackendUnavailable):
                if name in dispatch.engine(other).OPTIONS:
                    having.append(f"backend={other!r}")
        if having:
            raise UnknownArgumentError(
                f"run() has the argument {name!r} only with {', '.join(having)}, not with "
                f"backend={backend!r}; change backend=, or leave out the argument"
            )


def adopted(engine: Any, name: str, x: Any) -> Any:
    """Return `x` as an array of a library that the engine supports, converted if possible."""
    return engine.adopt(name, x) if only_dlpack(x) and hasattr(engine, "adopt") else x
