"""`Case`: a problem, and a backend to run it. `MeasuredPass`: a measured pass of a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any

from flashsim.api import counting
from flashsim.api.dispatch import ON_CPU, backend_name
from flashsim.backends.failures import require_cupy
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError, UnsupportedError, own_errors
from flashsim.problem.hardware import PRESETS, Device
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling
from flashsim.studies.verify.ncu import MeasuredLaunch

#: The fields of a problem that a case has, in a file and in the measured process.
_SHAPE = (
    *("n_q", "n_kv", "head_dim", "head_dim_v", "batch", "heads", "kv_heads", "dtype", "causal"),
    *("window", "softcap"),
)


#: The `device` of a case that is predicted for the GPU on which it is measured.
HERE = "this GPU"


@own_errors
def here() -> str:
    """Return the name of the device preset that describes this machine's GPU.

    Raises
    ------
    BackendUnavailable
        If there is no GPU, or CuPy is missing.
    OptionError
        If no preset matches the GPU.
    """
    require_cupy("cupy")
    from flashsim.backends.cupy_gpu import device

    return device.preset().name


@own_errors
@dataclass(frozen=True)
class Case:
    """A case to measure: a problem, and how a backend runs it.

    Attributes
    ----------
    problem : Problem
        Dense, causal or windowed, with or without a softcap.
    device : str
        The device of the prediction. Default: `HERE`, which `record` replaces by the preset of the
        GPU that it measures.
    kernel : str or None
        "hopper" or "portable", which is passed to `run`. If it is None, `run` uses its default.
    tilings : (Tiling or None, Tiling or None)
        The tilings of the forward and the backward pass. If one is None, the backend chooses.
    backward : tuple of (bool or None)
        One entry per backward pass: the argument `deterministic` with which `Result.backward` runs.

    Raises
    ------
    UnsupportedError
        If the problem has any other feature.
    """

    problem: Problem
    algorithm: str = "flash2"
    backend: str = "cupy"
    device: str = HERE
    kernel: str | None = None
    tilings: tuple[Tiling | None, Tiling | None] = (None, None)
    backward: tuple[bool | None, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", backend_name(self.backend))
        carried = Problem(**{name: getattr(self.problem, name) for name in _SHAPE})
        for one in fields(Problem):
            if getattr(self.problem, one.name) != getattr(carried, one.name):
                raise UnsupportedError(
                    f"the problem sets {one.name}, which a case cannot have; set only "
                    f"{', '.join(_SHAPE)}"
                )

    def placed(self) -> Case:
        """Return the case, or a copy for this machine's GPU if the case's device is `HERE`.

        Raises
        ------
        BackendUnavailable, OptionError
            As `here`; also if the backend does not run on a GPU.
        """
        if self.device != HERE:
            return self
        if self.backend in ON_CPU:
            raise OptionError(
                f"backend {self.backend!r} does not run on a GPU; choose a GPU with device=, "
                f"one of: {', '.join(PRESETS)}"
            )
        return replace(self, device=here())

    def to_dict(self) -> dict[str, Any]:
        """Return the case's fields as plain values for JSON."""
        sides = [None if t is None else astuple(t) for t in self.tilings]
        shape = {name: getattr(self.problem, name) for name in _SHAPE}
        return vars(self) | {"problem": shape, "tilings": sides}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Case:
        """Build a case from the result of `to_dict`."""
        window = values["problem"]["window"]
        shape = values["problem"] | {"window": None if window is None else tuple(window)}
        tilings = tuple(None if t is None else Tiling(*t) for t in values["tilings"])
        changed = {"tilings": tilings, "backward": tuple(values["backward"])}
        return cls(**{**values, "problem": Problem(**shape), **changed})

    def __str__(self) -> str:
        p = self.problem
        return (
            f"{p.batch} x {p.heads} heads{f' ({p.kv_heads} key heads)' if p.group > 1 else ''}, "
            f"{p.n_q:,} x {p.n_kv:,}, d={p.head_dim}"
            f"{f' and {p.head_dim_v}' if p.head_dim_v != p.head_dim else ''}, {p.dtype}"
            f"{', causal' if p.causal else ''}{f', window {p.window}' if p.window else ''}"
            f"{f', softcap {p.softcap:g}' if p.softcap else ''} on {self.device}"
        )


@dataclass(frozen=True)
class Counted:
    """The transfers of one pass, as its kernels reported them.

    The keys of `transfers` are (stage, op, tensor), and its values are bytes. `pack_gqa` says
    whether query heads shared row tiles.
    """

    algorithm: str
    direction: str
    tiling: Tiling
    transfers: Mapping[tuple[str, str, str], int]
    pack_gqa: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the reported counts as plain values for JSON."""
        transfers = [(*key, nbytes) for key, nbytes in self.transfers.items()]
        return vars(self) | {"tiling": astuple(self.tiling), "transfers": transfers}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Counted:
        """Build the reported counts from the result of `to_dict`."""
        transfers = {(stage, op, tensor): n for stage, op, tensor, n in values["transfers"]}
        return cls(**{**values, "tiling": Tiling(*values["tiling"]), "transfers": transfers})

    def predicted(self, case: Case) -> Traffic:
        """Return the predicted traffic of the pass whose transfers were reported."""
        how = self.algorithm, self.direction, self.tiling, case.device, self.pack_gqa
        return predict(case.problem, *how)


@dataclass(frozen=True)
class MeasuredPass:
    """A pass with its prediction, its measured launches and the transfers that kernels reported.

    Attributes
    ----------
    launches : dict of list of MeasuredLaunch
        The measured launches by stage.
    counted : dict or None
        The kernel-reported transfers.
    in_turns, python : bool
        Whether the kernels added to dQ in a fixed order, and are those of `backend="numba_cuda"`.
    """

    traffic: Traffic
    launches: Mapping[str, Sequence[MeasuredLaunch]] = field(default_factory=dict)
    counted: Mapping[tuple[str, str, str], int] | None = None
    in_turns: bool = False
    python: bool = False


@own_errors
def predict(
    problem: Problem,
    algorithm: str,
    direction: str,
    tiling: Tiling | None,
    device: str | Device,
    pack_gqa: bool = False,
) -> Traffic:
    """Return the predicted bytes and FLOPs of a pass by GPU kernels.

    Unlike `flashsim.count`, the function accepts tiles that exceed shared memory, because GPU
    kernels also keep tiles in registers.
    """
    here = Device.get(device)
    wide = replace(here, sram_bytes=here.sram_per_sm + here.registers_per_sm)
    how: dict[str, Any] = {"algorithm": algorithm, "direction": direction, "tiling": tiling}
    return counting.count(problem, **how, device=wide, pack_gqa=pack_gqa or None)
