"""The results of a forward and a backward pass: `Result` and `Gradients`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashsim import report
from flashsim.api import array_libraries, dispatch, inputs
from flashsim.api.arrays import (
    check_like,
    expand,
    only_dlpack,
    require_numpy,
    squeeze,
    warn_of_overflow,
)
from flashsim.api.request import Checked, adopted
from flashsim.engines.protocol import Job, Outcome
from flashsim.errors import TraceError, UnsupportedError, own_errors
from flashsim.functions.tracing import Traced
from flashsim.problem import checks
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule.split import WHOLE, Split
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace
from flashsim.version import __version__


class _Pass:
    """Base class of `Result` and `Gradients`: holds the trace of the pass if one was requested."""

    _trace: Trace | None

    @property
    def traced(self) -> bool:
        """Return whether a trace of the pass was recorded."""
        return self._trace is not None

    @property
    def trace(self) -> Trace:
        """Return the trace, which lists every transfer of the pass.

        Raises
        ------
        TraceError
            If the pass ran without ``trace=True``.
        """
        if self._trace is None:
            raise TraceError(
                "there is no trace; pass trace=True to run (or to backward), and arrays whose axes "
                "all have a length of at least 1"
            )
        return self._trace

    __repr__ = report.short

    def _repr_html_(self) -> str:
        return report.card(self) + (self.trace.table().html() if self.traced else "")


@own_errors
@dataclass(frozen=True, eq=False, repr=False)
class Gradients(_Pass):
    """Gradients of ``sum(out * dout) + sum(lse * dlse)``, shaped and typed like the inputs.

    Attributes
    ----------
    dq, dk, dv : array
    dbias : array or None
        Shaped like the bias, or None if there is no bias.
    captured : dict
        The requested gradients of the score function's captured arrays, by name.
    dsinks : array (heads,) or None
        In the accumulator's type, or None if there are no sinks.
    kernel : str
        The kernel that ran.
    tiling : Tiling
        The tiling of that kernel.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    captured: dict[str, Any]
    dsinks: Any
    kernel: str
    tiling: Tiling
    _trace: Trace | None = field(repr=False)


@own_errors
@dataclass(frozen=True, eq=False, repr=False)
class Result(_Pass):
    """The result of `run`: `out`, `lse`, a trace, and `backward`.

    Attributes
    ----------
    out : array, shaped like q with v's head_dim
    lse : array, q's shape without its last axis
        Natural log of the sum of exponentials of each row of scores, in the accumulator type.
    kernel : str
        The kernel that ran.
    tiling : Tiling
        The tiling of that kernel.
    split : Split
        Whether its row tiles have all query heads of a KV head (`pack_gqa`), and in how many parts
        it processed the keys.
    """

    out: Any
    lse: Any
    kernel: str
    tiling: Tiling
    split: Split = field(default=WHOLE, kw_only=True, repr=False)
    _trace: Trace | None = field(repr=False)
    _job: Job = field(repr=False)
    _saved: Mapping[str, Any] = field(repr=False)
    _asked: Checked = field(repr=False)

    @property
    def problem(self) -> Problem:
        """Return the attention problem that was solved.

        Raises
        ------
        UnsupportedError
            If the batch, the queries or the keys had size 0, so that there was no problem.
        """
        if self._asked.empty:
            raise UnsupportedError(
                "no flashsim.Problem describes this call, because its arrays have an axis of "
                "length 0; pass arrays whose axes all have a length of at least 1"
            )
        return self._job.problem

    @property
    def copied(self) -> Mapping[str, int]:
        """Return the bytes of each input that was copied because GPU kernels cannot read it as is.

        The GPU kernels read rows in 16-byte pieces on 16-byte boundaries, so a head_dim that is not
        a multiple of 8 is padded. A trace counts neither padding nor copies.
        """
        return self._saved.get("copied", {})

    def backward(
        self,
        dout: Any,
        *,
        dlse: Any = None,
        tiling: Tiling | None = None,
        deterministic: bool | None = None,
        trace: bool | str | None = None,
        captured: bool | Sequence[str] | None = None,
    ) -> Gradients:
        """Compute the gradients with the algorithm of the forward pass, recomputing P.

        The FlashAttention-2 paper's backward pass (Algorithm 2 of arXiv:2307.08691) is one KV-outer
        pass that adds to dQ by atomics; flashsim calls it "flash2-fused". "flash2" runs three
        passes without atomics: one for delta, one for dK and dV, one for dQ. Because the dQ pass
        recomputes the scores, "flash2" takes 7 matrix products instead of 5.

        Do not change the inputs of `run`, `out` or `lse` in place before you call this method,
        because it reads them without a copy.

        Parameters
        ----------
        dout : array
            Gradient of the loss with respect to `out`; same shape and dtype.
        dlse : array, optional
            Gradient of the loss with respect to `lse`; same shape and dtype. Leave `dlse` out if
            the loss does not depend on the LSE; the kernels then read no `dlse`.
        tiling : Tiling, optional
            Default: the best that fits; a backward pass holds more buffers than a forward pass.
        deterministic : bool, optional
            For FlashAttention-2 only. True runs the three-pass form without atomics. If the backend
            can run the fused form with dQ's additions in a fixed order, and that form is faster,
            True runs it instead. False runs the fused form, or the three-pass form if the backend
            chooses the tiling and knows that it is faster. After ``algorithm="flash2-fused"``,
            False always runs the fused form. After "flash2", False may also run the form
            "flash2-fused-first", which writes no zeros to dQ. With either value a backend may run
            "flash2-once", which adds nothing up, if it knows that this is faster: for short
            sequences on a Hopper GPU. A trace says which form ran. Default: by `algorithm`
            ("flash2", three-pass: True; "flash2-fused": False).
        trace : bool or "timeline", optional
            Default: as in `run`.
        captured : bool or sequence of str, optional
            The captured arrays of `score_mod` to compute gradients for, by the names of the
            variables that refer to them; True: all arrays of floats. Default: those whose
            `requires_grad` is true, as torch's parameters.

        Raises
        ------
        ShapeError, DTypeError, OptionError, SramOverflow
        """
        asked, mine, host = self._asked, self._job, self._asked.host
        on_cpu = asked.backend in dispatch.ON_CPU
        wanted = _wanted(asked.score, captured)
        alike = None if on_cpu else _alike(mine, dout, dlse, tiling, deterministic, trace)
        if mine.problem.score_mod is not None or mine.bias is not None:
            alike = None
        known = None if alike is None else mine.memo.get(alike)
        if known is None:
            arrays = {"dout": dout} if dlse is None else {"dout": dout, "dlse": dlse}
            arrays = {name: adopted(asked.engine, name, x) for name, x in arrays.items()}
            dout, *rest = array_libraries.take(host, **arrays)
            check_like("dout", dout, self.out, "out")
            if dlse is not None:
                dlse = check_like("dlse", rest[0], self.lse, "lse")
            if on_cpu:
                require_numpy(asked.backend, dout=dout, dlse=dlse)
            inputs.check_tiling(tiling)
            job = asked.backward_job(
                *(mine, self._saved, tiling, deterministic, trace),
                dlse=dlse is not None,
                captured=wanted,
            )
            if alike is not None:
                mine.memo[alike] = job.given(None, None, None)
        else:
            job = known.given(mine.q, mine.k, mine.v)
        wide = None if dlse is None else expand(dlse, 3)
        outcome = asked.engine.backward(job, self._saved, expand(dout), wide)
        arrays = outcome.arrays
        if on_cpu:
            given = {"dout": dout, **({} if dlse is None else {"dlse": dlse}), **job.inputs}
            warn_of_overflow(outcome.unseen(*arrays), given)
        dbias = arrays.get("dbias")
        return made(
            Gradients,
            **{name: host.give(squeeze(arrays[name], asked.ndim)) for name in ("dq", "dk", "dv")},
            dbias=None if dbias is None else host.give(dbias.reshape(asked.bias_shape)),
            captured=_captured(asked.score, wanted, arrays, host.give),
            dsinks=None if "dsinks" not in arrays else host.give(arrays["dsinks"]),
            kernel=outcome.kernel,
            tiling=outcome.tiling,
            _trace=recorded(job, outcome, "backward", asked.backend),
        )


def _wanted(score: Traced | None, asked: bool | Sequence[str] | None) -> list[str]:
    """Return the names of the captured arrays whose gradients were requested."""
    able = [] if score is None else [spec.name for spec in score.graph.differentiable]
    if asked is True:
        return able
    if asked is None or asked is False:
        if score is None or asked is False:
            return []
        pairs = zip(score.graph.arrays, score.arrays, strict=True)
        asking = {spec.name for spec, x in pairs if getattr(x, "requires_grad", False)}
        return [name for name in able if name in asking]
    for name in [asked] if isinstance(asked, str) else asked:
        checks.one_of("captured", name, able)
    return [name for name in able if name in asked]


def _captured(
    score: Traced | None,
    wanted: Sequence[str],
    results: Mapping[str, Any],
    give: Callable[[Any], Any],
) -> dict[str, Any]:
    """Return the captured arrays' gradients by name, each in its array's shape and type."""
    captured = {}
    for spec in () if score is None else score.graph.arrays:
        if spec.name in wanted:
            gradient = results[f"d:{spec.name}"]
            if isinstance(gradient, np.ndarray):
                gradient = gradient.astype(numpy_dtype(spec.dtype), copy=False)
            captured[spec.name] = give(gradient)
    return captured


def _alike(mine: Job, dout: Any, dlse: Any, *how: Any) -> tuple[Any, ...] | None:
    """Return a cache key for a GPU backward pass's checks, or None if each call must be checked."""
    arrays = (dout,) if dlse is None else (dout, dlse)
    if any(isinstance(x, np.ndarray) or only_dlpack(x) for x in arrays):
        return None
    try:
        looks = [part for x in arrays for part in (x.shape, x.dtype, type(x))]
        key = (mine.algorithm, *looks, *how, *map(type, how))
        hash(key)
    except (AttributeError, TypeError):  # no array; or a value that has no hash
        return None
    return key


def made(kind: Any, **fields: Any) -> Any:
    """Make an object of a frozen dataclass from its fields, 2 us faster than `__init__` does."""
    instance = object.__new__(kind)
    instance.__dict__.update(fields)
    return instance


def recorded(job: Job, outcome: Outcome, direction: str, backend: str) -> Trace | None:
    """Return the trace that an engine recorded, or None if it recorded none."""
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
    """Return a dict with a trace's origin: versions of packages, the kernel and the device."""
    return {
        "flashsim": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "kernel": kernel,
        **({"gpu": gpu} if gpu else {}),
    }
