"""What a pass returns: `Result` and `Gradients`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashsim import report
from flashsim.api import dispatch, hosts, inputs
from flashsim.api.asked import Checked, adopted
from flashsim.engines.engine import Job, Outcome
from flashsim.errors import TraceError, own_errors
from flashsim.problem.problem import Problem
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


@own_errors
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


@own_errors
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

        Reads the inputs of `run`, `out` and `lse` where they lie: do not change them in place
        before.

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
        asked = Checked(engine, self._backend, self._host, self._job, ndim, self._bias_shape)
        return gradients(asked, self.out, self._saved, dout, tiling, deterministic, trace)


def _cell(ran: Result | Gradients) -> str:
    """What a notebook shows of a pass: arrays by shape, and below what was moved."""
    return report.card(ran) + (ran.trace.table().html() if ran.traced else "")


def gradients(
    asked: Checked,
    out: Any,
    saved: Mapping[str, Any],
    dout: Any,
    tiling: Tiling | None,
    deterministic: bool | None,
    trace: bool | str | None,
) -> Gradients:
    """The backward pass; `out` is what `dout` must look like."""
    engine = asked.engine
    (dout,) = hosts.take(asked.host, dout=adopted(engine, "dout", dout))
    inputs.check_like("dout", dout, out, "out")
    if asked.backend in dispatch.ON_CPU:
        inputs.require_numpy(asked.backend, dout=dout)
    inputs.check_tiling(tiling)
    job = asked.backward_job(saved, tiling, deterministic, trace)
    outcome = engine.backward(job, saved, inputs.expand(dout))
    if asked.backend in dispatch.ON_CPU:
        inputs.warn_of_overflow(outcome.arrays, {"dout": dout, **job.arrays})
    arrays = dict(outcome.arrays)
    dbias = arrays.pop("dbias", None)
    give, ndim = asked.host.give, asked.ndim
    return Gradients(
        **{name: give(inputs.squeeze(x, ndim)) for name, x in arrays.items()},
        dbias=None if dbias is None else give(dbias.reshape(asked.bias_shape)),
        _trace=recorded(job, outcome, "backward", asked.backend),
        kernel=outcome.kernel,
        tiling=outcome.tiling,
    )


def recorded(job: Job, outcome: Outcome, direction: str, backend: str) -> Trace | None:
    """What an engine recorded, if it did."""
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
