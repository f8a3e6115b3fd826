"""The public function `run`, and what it returns."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flashsim import report
from flashsim.api import dispatch, hosts, inputs
from flashsim.api.caches import CACHES, check_alike, live_problem
from flashsim.engines.engine import Engine, Job, Outcome
from flashsim.errors import TraceError
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace
from flashsim.version import __version__


class _Pass:
    """What a pass recorded, if it was asked to."""

    _trace: Trace | None

    @property
    def traced(self) -> bool:
        """Whether the pass was recorded."""
        return self._trace is not None

    @property
    def trace(self) -> Trace:
        """What was moved.

        Raises
        ------
        TraceError
            If the pass ran without ``trace=True``.
        """
        if self._trace is None:
            raise TraceError("nothing was recorded; run with trace=True (or backward with it)")
        return self._trace


@dataclass(frozen=True, eq=False)
class Gradients(_Pass):
    """Gradients of ``sum(out * dout)``, shaped and typed like the inputs.

    Attributes
    ----------
    dq, dk, dv : array
    dbias : array or None
        Shaped like the bias, if there was one.
    kernel : str
        What ran.
    tiling : Tiling
        On which tiles.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    kernel: str
    tiling: Tiling
    _trace: Trace | None = field(repr=False)

    __repr__ = report.short

    def _repr_html_(self) -> str:
        return _cell(self)


@dataclass(frozen=True, eq=False)
class Result(_Pass):
    """What `run` returns.

    Attributes
    ----------
    out : array, shaped like q with v's head_dim
    lse : array, q's shape without its last axis
        Natural log of the sum of exponentials of each row of scores, in the accumulator type.
    kernel : str
        What ran.
    tiling : Tiling
        On which tiles.
    """

    out: Any
    lse: Any
    kernel: str
    tiling: Tiling
    _trace: Trace | None = field(repr=False)
    _job: Job = field(repr=False)
    _saved: Mapping[str, Any] = field(repr=False)
    _backend: str = field(repr=False)
    _bias_shape: tuple[int, ...] | None = field(repr=False)
    _host: hosts.Host = field(repr=False)

    __repr__ = report.short

    def _repr_html_(self) -> str:
        return _cell(self)

    @property
    def problem(self) -> Problem:
        """The problem that was solved."""
        return self._job.problem

    @property
    def copied(self) -> Mapping[str, int]:
        """Bytes, by tensor, of the copies on the GPU of inputs that its kernels cannot read.

        They read rows of whole 16-byte pieces on 16-byte boundaries: a head_dim that is no
        multiple of 8 is padded. A trace counts elements that exist, and no copy.
        """
        return self._saved.get("copied", {})

    def backward(
        self,
        dout: Any,
        *,
        tiling: Tiling | None = None,
        deterministic: bool | None = None,
        trace: bool | str | None = None,
    ) -> Gradients:
        """The backward pass of the same algorithm, recomputing what was not saved.

        Reads the inputs of `run`, and `out`, where they lie: do not change them in place before.

        Parameters
        ----------
        dout : array
            Gradient of the loss with respect to `out`; same shape and dtype.
        tiling : Tiling, optional
            Default: the best that fits; a backward pass holds more buffers than a forward pass.
        deterministic : bool, optional
            For FlashAttention-2: True runs the three-pass form without atomics or, on a backend
            that can and where that is faster, the fused one with dQ's additions in a fixed order;
            False runs the fused one or, on a backend that knows where that is faster and chooses
            the tiling, the three passes (after ``algorithm="flash2-fused"`` always the fused one).
            Default: what `algorithm` says ("flash2": True,
            "flash2-fused": False).
        trace : bool or "timeline", optional
            Default: as in `run`.

        Raises
        ------
        ShapeError, DTypeError, OptionError, SramOverflow
        """
        engine = dispatch.engine(self._backend)
        ndim = len(self.out.shape)
        asked = _Asked(engine, self._backend, self._host, self._job, ndim, self._bias_shape)
        return asked.gradients(self.out, self._saved, dout, tiling, deterministic, trace)


def _cell(ran: Result | Gradients) -> str:
    """What a notebook shows of a pass: arrays by shape, and below what was moved."""
    return report.card(ran) + (ran.trace.table().html() if ran.traced else "")


def run(
    q: Any,
    k: Any,
    v: Any,
    *,
    algorithm: str = "flash2",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Any = None,
    mask: Callable[..., Any] | None = None,
    block_mask: Any = None,
    cu_seqlens_q: Sequence[int] | None = None,
    cu_seqlens_k: Sequence[int] | None = None,
    tiling: Tiling | None = None,
    device: str | Device = "H100",
    backend: str = "numpy",
    key_order: str = "ascending",
    nan_policy: str = "propagate",
    trace: bool | str = False,
    **options: Any,
) -> Result:
    """Attention, tile by tile.

    Computes ``softmax(mask(softcap(scale q k^T) + bias)) v``.

    Parameters
    ----------
    q : array, (batch, heads, n_q, head_dim); leading axes may be left out
    k, v : array, (batch, kv_heads, n_kv, head_dim) and (batch, kv_heads, n_kv, head_dim_v)
        `heads` must be a multiple of `kv_heads`; v may be None where an option `head_dim_v` says
        which of k's columns it is. float64, float32, float16 or bfloat16 (on a GPU not float64). On
        the CPU, arrays of NumPy, torch, or any library that speaks DLPack (JAX); what goes in comes
        out, and is not copied on its way in.
    algorithm : {"flash2", "flash2-fused", "flash1", "standard", "flash-decode"}
        "flash1" and "standard" hold what the first papers describe; "flash2-fused" differs from
        "flash2" in the backward pass only; "flash-decode" divides the keys as well, for few queries
        of a long cache, and has no backward pass.
    causal, window, softcap, scale, mask, cu_seqlens_q, cu_seqlens_k
        See `Problem`.
    bias : array, (1 or batch, 1 or heads, n_q, n_kv), optional
        Added to the scores, in q's dtype; leading axes may be left out.
    block_mask : BlockMask, or a boolean grid with one value a tile (then give `tiling`), optional
    tiling : Tiling, optional
        Default: the tiling that fits `device` and moves the fewest bytes.
    device : str or Device
        The machine that is simulated; see ``flashsim devices`` for names.
    backend : str
        "numpy": the simulator. "numba": the same tiles as fast as this CPU can (FlashAttention-2
        only), with the same trace; compiled at the first call, then cached on disk. "cupy": CUDA
        C++ kernels on the NVIDIA GPU that holds the arrays (NumPy arrays are copied there and
        back); "numba_cuda": kernels in Python there. What goes in comes out: NumPy, CuPy or torch;
        another library's GPU arrays, by ``__cuda_array_interface__`` or ``__dlpack__``, come out
        as CuPy's over memory that it can take back through DLPack.
    key_order : {"ascending", "descending"}
        In which order key tiles are taken.
    nan_policy : {"propagate", "raise"}
        What to do about NaN and infinity in the inputs.
    trace : bool or "timeline"
        Record what moves. "timeline" also records where and when: on a GPU, by any kernels but the
        "teaching" ones of "numba_cuda", so by that backend not for float32.
    **options
        Options of the backend, where it has any. "numpy", for "flash-decode": `splits`, into how
        many parts the keys are divided: an integer, "auto" (default: as many as occupy `device`'s
        SMs once) or "fa3" (FlashAttention-3's rule), and `pack_gqa` (default: True), whether the
        query heads of a key head share a tile, so that K and V are loaded once for
        them; `cache_seqlens`, (batch,): how many keys of each entry are live (causal is aligned to
        their end); `block_table`, integers (batch, max_pages): k and v are (pages, kv_heads,
        page_size, head_dim), and entry b's keys lie in the pages of its row; `shared_prefix`: all
        entries begin with so many keys, which are walked once for the queries of all (cascade
        attention), or in so many keys' pages, whole ones; with v=None,
        `head_dim_v`: V is k's first columns, as many, and one load serves both (latent attention).
        "numba": `threads`, how many (default: every CPU
        this process may use), and `micro_kernel`, "vector" or "plain". "cupy": `kernel`, "hopper"
        or "portable" (default: Hopper's wherever they run the problem), and `allow_tf32`: float32
        products on tensor cores, every operand rounded to tf32, which is off by at most 2**-11 of
        itself (default: False, float32 throughout). With ``algorithm="flash-decode"``, a few
        queries against a cache whose keys are split over blocks: `splits` ("auto" or how many),
        `cache_seqlens` (batch,), how many keys of each sequence are live, `block_table` (batch,
        pages of a sequence), int32, with k and v in pages, (pages, kv_heads, rows of a page,
        head_dim), and `workspace` (`flashsim.backends.cupy_gpu.decode.Workspace`). "numba_cuda":
        `kernel`, "hopper" (forward only), "tensor" (both: float16 and bfloat16) or "teaching"
        (float16 and float32); default: the first of them that runs the problem.

    Returns
    -------
    Result
        With `out`, `lse`, `trace` and a `backward(dout)` method.

    Raises
    ------
    FlashSimError
        Of a kind that fits (each is also a ValueError, TypeError, ...): what was wrong, what was
        given, what is possible.
    """
    rare = bias, mask, block_mask, cu_seqlens_q, cu_seqlens_k, nan_policy
    plain = (
        *(algorithm, causal, window, softcap, scale),
        *(tiling, device, backend, key_order, trace),
    )
    key = _key(q, k, v, rare, plain, options)
    asked = None if key is None else _ASKED.get(key)
    if asked is None:
        asked = _ask(
            *(q, k, v, options),
            algorithm=algorithm,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            bias=bias,
            mask=mask,
            block_mask=block_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            tiling=tiling,
            device=device,
            backend=backend,
            key_order=key_order,
            nan_policy=nan_policy,
            trace=trace,
        )
        job = asked.job
        if key is not None:
            if len(_ASKED) >= _MOST_ASKED:
                _ASKED.clear()
            _ASKED[key] = replace(asked, job=job.given(None, None, None))
    elif asked.ndim == 4:
        job = asked.job.given(q, k, v)
    else:
        job = asked.job.given(inputs.expand(q), inputs.expand(k), inputs.expand(v))
    give = asked.host.give
    outcome = asked.engine.forward(job)
    if backend in dispatch.ON_CPU:
        inputs.warn_of_overflow({"out": outcome.arrays["out"]}, _arrays(job))
    ndim = asked.ndim
    return Result(
        out=give(inputs.squeeze(outcome.arrays["out"], ndim)),
        lse=give(inputs.squeeze(outcome.arrays["lse"], ndim - 1)),
        _trace=_trace(job, outcome, "forward", backend),
        kernel=outcome.kernel,
        tiling=outcome.tiling,
        _job=job,
        _saved=outcome.saved,
        _backend=backend,
        _bias_shape=asked.bias_shape,
        _host=asked.host,
    )


def _arrays(job: Job) -> dict[str, Any]:
    """What was given, by name."""
    arrays = {"q": job.q, "k": job.k, "v": job.v, "bias": job.bias}
    return {name: x for name, x in arrays.items() if x is not None}


def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    *,
    deterministic: bool | None = None,
    **question: Any,
) -> Gradients:
    """The backward pass of a forward pass of which only `out` and `lse` were kept.

    Parameters
    ----------
    q, k, v : array
        As they were given to `run`.
    out, lse, dout : array
        As `run` returned them, and the gradient of the loss with respect to `out`.
    deterministic : bool, optional
        As in `Result.backward`.
    **question
        The keywords of `run`. `tiling` and `trace` are the backward pass's. The algorithm must be
        one that recomputes its probabilities: not "standard", which saves them.

    Returns
    -------
    Gradients

    Raises
    ------
    FlashSimError
    """
    keywords = {name: question.pop(name, x) for name, x in _DEFAULTS.items()}
    asked = _ask(q, k, v, question, **keywords)
    p = asked.job.problem
    rows = (p.batch, p.heads, p.n_q)[4 - asked.ndim :]
    out, lse = hosts.take(asked.host, out=out, lse=lse)
    inputs.check_kept("out", out, (*rows, p.head_dim_v), p.dtype)
    inputs.check_kept("lse", lse, rows, p.compute_dtype)
    saved = asked.engine.recall(asked.job, inputs.expand(out), inputs.expand(lse, 3))
    return asked.gradients(out, saved, dout, keywords["tiling"], deterministic, None)


_DEFAULTS = run.__kwdefaults__ or {}
#: What was asked on a GPU, without its arrays, by all that the checks look at: a short call takes
#: less time than they do. Only for questions without a bias, masks and lengths, whose values may
#: change.
_ASKED: dict[tuple[Any, ...], _Asked] = {}
_MOST_ASKED = 256
_PLAIN = frozenset({"kernel", "allow_tf32"})


def _key(
    q: Any,
    k: Any,
    v: Any,
    rare: tuple[Any, ...],
    plain: tuple[Any, ...],
    options: Mapping[str, Any],
) -> tuple[Any, ...] | None:
    """Where `_ASKED` has a question, or None for one that is asked anew each time.

    `rare` is what must be left out, `plain` what is compared: True and 1 are equal, so the types
    stand beside the values.
    """
    *arrays, nan_policy = rare
    _, causal, window, softcap, scale, _, _, backend, _, trace = plain
    on_gpu = isinstance(backend, str) and backend not in dispatch.ON_CPU
    if not on_gpu or isinstance(q, np.ndarray) or any(x is not None for x in arrays):
        return None
    usual = isinstance(nan_policy, str) and nan_policy == "propagate"
    if not usual or not _PLAIN.issuperset(options):
        return None
    try:
        given = [part for x in (q, k, v) for part in (x.shape, x.dtype, type(x))]
        kinds = [type(x) for x in (causal, window, softcap, scale, trace)]
        key = (*given, *plain, *kinds, *options.items())
        hash(key)
    except (AttributeError, TypeError):  # no array; or a value that has no hash
        return None
    return key


@dataclass(frozen=True)
class _Asked:
    """A question that passed every check: the job, who runs it, and what its arrays came as."""

    engine: Engine
    backend: str
    host: hosts.Host
    job: Job
    ndim: int
    bias_shape: tuple[int, ...] | None

    def gradients(
        self,
        out: Any,
        saved: Mapping[str, Any],
        dout: Any,
        tiling: Tiling | None,
        deterministic: bool | None,
        trace: bool | str | None,
    ) -> Gradients:
        """The backward pass; `out` is what `dout` must look like."""
        engine = self.engine
        (dout,) = hosts.take(self.host, dout=_known(engine, "dout", dout))
        inputs.check_like("dout", dout, out, "out")
        if self.backend in dispatch.ON_CPU:
            inputs.require_numpy(self.backend, dout=dout)
        inputs.check_tiling(tiling)
        job = self._backward_job(saved, tiling, deterministic, trace)
        outcome = engine.backward(job, saved, inputs.expand(dout))
        if self.backend in dispatch.ON_CPU:
            inputs.warn_of_overflow(outcome.arrays, {"dout": dout, **_arrays(job)})
        arrays = dict(outcome.arrays)
        dbias = arrays.pop("dbias", None)
        give, ndim = self.host.give, self.ndim
        return Gradients(
            **{name: give(inputs.squeeze(x, ndim)) for name, x in arrays.items()},
            dbias=None if dbias is None else give(dbias.reshape(self.bias_shape)),
            _trace=_trace(job, outcome, "backward", self.backend),
            kernel=outcome.kernel,
            tiling=outcome.tiling,
        )

    def _backward_job(
        self,
        saved: Mapping[str, Any],
        tiling: Tiling | None,
        deterministic: bool | None,
        trace: bool | str | None,
    ) -> Job:
        """Which backward pass is asked for; found out once."""
        engine, mine = self.engine, self.job
        algorithm = plans.backward_form(mine.algorithm, deterministic)  # or say what it may be
        if trace is not None:
            trace = inputs.check_trace_mode(trace, self.backend)
        key = "backward", tiling, deterministic, type(deterministic), trace, type(trace)
        if known := mine.memo.get(key):
            return known.given(mine.q, mine.k, mine.v)
        job = replace(
            mine,
            tiling=tiling,
            algorithm=algorithm,
            trace=mine.trace if trace is None else trace,
            memo={},
        )
        free = deterministic is False and mine.algorithm == "flash2" and tiling is None
        if free and hasattr(engine, "fuses") and not engine.fuses(job, saved):
            job = replace(job, algorithm="flash2")
        if deterministic and hasattr(engine, "orders_dq"):
            ordered = replace(job, algorithm="flash2-fused", deterministic=True)
            job = ordered if engine.orders_dq(ordered, saved) else job
        mine.memo[key] = job.given(None, None, None)
        return job


def _ask(
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
    **question: Any,
) -> _Asked:
    """Check what `run` or `backward` was given; `question` goes to `inputs.prepare`."""
    engine = dispatch.engine(backend)
    if options:
        inputs.reject_unknown(
            (name for name in options if name not in engine.OPTIONS),
            [*_DEFAULTS, *engine.OPTIONS],
            "run",
        )
    plans.check_algorithm(algorithm)
    inputs.check_decoding(algorithm, options)
    inputs.check_tiling(tiling)
    on_cpu = backend in dispatch.ON_CPU
    host = hosts.host_of(q) if on_cpu else hosts.ANY
    given_bias, table = bias, options.get("block_table")
    options = {name: x for name, x in options.items() if x is not None or name not in CACHES}
    v, latent = inputs.values_in_keys(k, v, options)
    if on_cpu:
        q, k, v, bias = hosts.take(host, q=q, k=k, v=v, bias=bias)
        table = None if table is None else checks.as_array("block_table", table)
    else:
        q, k, v = (_known(engine, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    question |= {"latent": latent, "block_table": table}
    given = inputs.prepare(q, k, v, bias=bias, tiling=tiling, **question)
    problem = given.problem
    if on_cpu:  # on a GPU, what lives of a cache is the launcher's to say, when lengths are known
        inputs.require_numpy(backend, q=given.q, k=given.k, v=given.v, bias=given.bias)
        if options.keys() & CACHES:
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
    return _Asked(engine, backend, host, job, given.ndim, bias_shape)


def _known(engine: Any, name: str, x: Any) -> Any:
    """An array of a kind that the engine knows, if it can make one of `x`."""
    return engine.adopt(name, x) if inputs.only_dlpack(x) and hasattr(engine, "adopt") else x


def _trace(job: Job, outcome: Outcome, direction: str, backend: str) -> Trace | None:
    if outcome.stages is None:
        return None
    return Trace(
        outcome.problem or job.problem,
        job.device,
        job.algorithm,
        direction,
        backend,
        outcome.stages,
        provenance(outcome.kernel, outcome.gpu),
        outcome.timeline,
    )


def provenance(kernel: str, gpu: str = "") -> dict[str, str]:
    """Versions, and what ran on what, for a trace."""
    return {
        "flashsim": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "kernel": kernel,
        **({"gpu": gpu} if gpu else {}),
    }


__all__ = ["Gradients", "Result", "backward", "run"]
