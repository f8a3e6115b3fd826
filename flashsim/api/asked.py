"""The arguments of `run` and `backward`, checked or remembered from an earlier call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashsim.api import dispatch, hosts, inputs, scales
from flashsim.api.arrays import expand, only_dlpack, require_numpy
from flashsim.api.caches import CACHES, check_alike, live_lengths, live_problem
from flashsim.engines.engine import Engine, Job
from flashsim.engines.nothing import Nothing
from flashsim.errors import (
    BackendUnavailable,
    OptionError,
    UnknownArgumentError,
    UnsupportedError,
    reject_unknown,
)
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.precision import Precision
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling

#: Options that may be None, which is the same as not given.
_OR_NONE = {*CACHES, "precision"}


@dataclass(frozen=True)
class Checked:
    """Arguments that passed every check: the job, its engine, and the kind of its arrays.

    `empty`: there is no batch, no query or no key, and the engine is `Nothing`.
    """

    engine: Engine
    backend: str
    host: hosts.Host
    job: Job
    ndim: int
    bias_shape: tuple[int, ...] | None
    empty: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Without the engine, a module, which is found again by its name: a `Result` pickles."""
        return {name: x for name, x in self.__dict__.items() if name != "engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        engine = dispatch.engine(state["backend"])
        self.__dict__.update(state, engine=Nothing(engine) if state["empty"] else engine)

    def again(self, q: Any, k: Any, v: Any) -> Job:
        """The same job with other arrays of the same shapes and types."""
        if self.ndim == 4:
            return self.job.given(q, k, v)
        return self.job.given(expand(q), expand(k), expand(v))

    def backward_job(
        self,
        mine: Job,
        saved: Mapping[str, Any],
        tiling: Tiling | None,
        deterministic: bool | None,
        trace: bool | str | None,
        *,
        dlse: bool,
    ) -> Job:
        """Which backward pass is asked for, after the forward pass `mine`.

        `dlse`: it is given a gradient of the LSE.
        """
        engine = self.engine
        algorithm = plans.backward_form(mine.algorithm, deterministic)  # or say what it may be
        if trace is not None:
            trace = inputs.check_trace_mode(trace, self.backend)
        job = replace(
            mine,
            problem=replace(mine.problem, dlse=True) if dlse else mine.problem,
            tiling=tiling,
            algorithm=algorithm,
            trace=mine.trace if trace is None else trace,
            memo={},
        )
        one_visit = deterministic is not None and mine.algorithm == "flash2" and tiling is None
        if one_visit and hasattr(engine, "stores_dq") and engine.stores_dq(job, saved):
            return replace(job, algorithm="flash2-once")
        free = deterministic is False and mine.algorithm == "flash2" and tiling is None
        if free and hasattr(engine, "fuses") and not engine.fuses(job, saved):
            job = replace(job, algorithm="flash2")
        if deterministic and hasattr(engine, "orders_dq"):
            ordered = replace(job, algorithm="flash2-fused", deterministic=True)
            job = ordered if engine.orders_dq(ordered, saved) else job
        return job


def ask(
    q: Any,
    k: Any,
    v: Any,
    options: Mapping[str, Any],
    *,
    algorithm: str,
    backend: str,
    bias: Any,
    tiling: Tiling | None,
    device: str | Device,
    key_order: str,
    trace: bool | str,
    names: Iterable[str],
    **question: Any,
) -> Checked:
    """Check the arguments of `run` or `backward`; `question` goes to `inputs.prepare`.

    `names` are the keywords of `run`, for who mistypes one.
    """
    backend = dispatch.backend_name(backend)
    engine = dispatch.engine(backend)
    if options.get("precision") is not None:
        checks.instance("precision", options["precision"], Precision, "flashsim.Precision")
        if "precision" not in engine.OPTIONS:
            raise UnsupportedError(
                f"backend {backend!r} rounds as its kernels do; precision is for "
                "backend='simulator'"
            )
        options["precision"].check(plans.check_algorithm(algorithm))
    unknown = [name for name in options if name not in engine.OPTIONS]
    if unknown:
        _refuse_of_other_backends(unknown, backend)
        reject_unknown(unknown, [*names, *engine.OPTIONS], "run")
    plans.check_algorithm(algorithm)
    inputs.check_decoding(algorithm, options)
    inputs.check_tiling(tiling)
    on_cpu = backend in dispatch.ON_CPU
    host = hosts.host_of(q) if on_cpu else hosts.ANY
    given_bias, table = bias, options.get("block_table")
    options = {name: x for name, x in options.items() if x is not None or name not in _OR_NONE}
    v, latent = inputs.values_in_keys(k, v, options)
    if on_cpu:
        q, k, v, bias = hosts.take(host, q=q, k=k, v=v, bias=bias)
        table = None if table is None else checks.as_array("block_table", table)
    else:
        q, k, v = (adopted(engine, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    scaled, block = options.pop("scales", None), options.pop("scale_block", None)
    unsaid = scaled is None
    scaled = None if unsaid else scales.said(scaled)
    if scaled is not None or block is not None:
        question["scales"] = scales.granularity(scaled, block, len(q.shape), tiling)
    question |= {"latent": latent, "block_table": table}
    given = inputs.prepare(q, k, v, bias=bias, tiling=tiling, may_be_empty=True, **question)
    problem, empty = given.problem, given.empty
    if problem.fp8 and "scales" not in engine.OPTIONS:
        raise UnsupportedError(
            f"backend {backend!r} takes no {problem.dtype}; backend='simulator' does, or convert "
            "q, k and v"
        )
    if problem.fp8 and unsaid:
        scales.require(problem.dtype)
    if not problem.fp8 and not unsaid and scaled is None:
        raise OptionError(
            f"scales={scales.UNSCALED!r} is of FP8 inputs; these are {problem.dtype}: leave it out"
        )
    if problem.scales is not None and not empty:
        options["scales"] = scales.checked(problem, scaled, values=on_cpu)
    if on_cpu:  # on a GPU, what lives of a cache is the launcher's to say, when lengths are known
        require_numpy(backend, q=given.q, k=given.k, v=given.v, bias=given.bias)
        if not empty and options.keys() & CACHES:
            empty = not any(live_lengths(problem, options))
        if not empty and options.keys() & CACHES:
            problem, options = live_problem(problem, options, tuple(k.shape))
            if table is None:
                check_alike(problem.shared_prefix, k=given.k, v=given.v)
    job = Job(
        *(problem, given.q, given.k, given.v, given.bias),
        *(tiling, Device.get(device), algorithm),
        inputs.check_key_order(key_order),
        inputs.check_trace_mode(trace, backend),
        options,
    )
    bias_shape = None if given_bias is None else tuple(given_bias.shape)
    runs = Nothing(engine) if empty else engine
    return Checked(runs, backend, host, job, given.ndim, bias_shape, empty)


def _refuse_of_other_backends(unknown: Iterable[str], backend: str) -> None:
    """Raise `UnknownArgumentError` for the first option that other backends have, if these are
    here."""
    for name in unknown:
        having = []
        for other in dispatch.BACKENDS:
            with suppress(BackendUnavailable):
                if name in dispatch.engine(other).OPTIONS:
                    having.append(f"backend={other!r}")
        if having:
            raise UnknownArgumentError(
                f"run() has no argument {name!r} with backend={backend!r}; "
                f"{' and '.join(having)} {'has' if len(having) == 1 else 'have'} it"
            )


def adopted(engine: Any, name: str, x: Any) -> Any:
    """`x` as an array of a kind that the engine knows, if the engine can convert it."""
    return engine.adopt(name, x) if only_dlpack(x) and hasattr(engine, "adopt") else x


#: What was asked, without its arrays, by all that the checks look at: a short call takes less time
#: than they do. Only for questions without a bias, masks and lengths, whose values may change; on
#: the CPU only about NumPy's own arrays, whole as they lie in memory.
_KEPT: dict[tuple[Any, ...], Checked] = {}
_MOST_KEPT = 256
_PLAIN = frozenset({"kernel", "allow_tf32", "threads", "micro_kernel"})


def key_of(
    q: Any,
    k: Any,
    v: Any,
    rare: tuple[Any, ...],
    plain: tuple[Any, ...],
    options: Mapping[str, Any],
) -> tuple[Any, ...] | None:
    """The key under which checked arguments are kept, or None if they are checked every time.

    `rare` is what must be left out, `plain` what is compared: True and 1 are equal, so the types
    stand beside the values.
    """
    _, causal, window, softcap, scale, _, _, backend, _, trace = plain
    on_cpu = isinstance(backend, str) and backend in (*dispatch.ON_CPU, "numpy")
    arrays = q, k, v
    if on_cpu and not all(type(x) is np.ndarray and x.flags.c_contiguous for x in arrays):
        return None
    if not on_cpu and isinstance(q, np.ndarray):
        return None
    bias, mask, cells, of_q, of_k, nan_policy = rare
    if not (bias is mask is cells is of_q is of_k is None):
        return None
    if not isinstance(nan_policy, str) or nan_policy != "propagate":
        return None
    if options and not _PLAIN.issuperset(options):
        return None
    try:
        return (
            *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, type(q), type(k), type(v)),
            *plain,
            *map(type, (causal, window, softcap, scale, trace)),
            *options.items(),
            *map(type, options.values()),
        )
    except AttributeError:  # no array
        return None


def recall(key: tuple[Any, ...] | None) -> Checked | None:
    """The checked arguments kept under `key`, if any."""
    try:
        return None if key is None else _KEPT.get(key)
    except TypeError:  # a value that has no hash
        return None


def keep(key: tuple[Any, ...] | None, asked: Checked) -> None:
    """Remember arguments that passed, if they have a key."""
    try:
        hash(key)
    except TypeError:
        return
    if key is not None:
        if len(_KEPT) >= _MOST_KEPT:
            _KEPT.clear()
        _KEPT[key] = replace(asked, job=asked.job.given(None, None, None))
