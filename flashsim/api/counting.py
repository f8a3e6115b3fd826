"""`count`: the bytes and FLOPs of an attention pass, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

from flashsim.api import inputs
from flashsim.api.decode_options import DecodeOptions, counted_fields, with_fields
from flashsim.api.kv_cache import CACHES, live_problem
from flashsim.counts import traffic
from flashsim.counts.traffic import Traffic
from flashsim.errors import DTypeError, OptionError, own_errors
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.split import WHOLE
from flashsim.schedule.split_kv import choose
from flashsim.schedule.tiling import Tiling

if TYPE_CHECKING:
    from flashsim.l2 import Dram, L2Model

LEVELS = ("requested", "dram")


class _How(TypedDict, total=False):
    algorithm: str
    direction: str
    tiling: Tiling | None
    device: str | Device
    key_order: str
    splits: int | str | None
    pack_gqa: bool | None
    cache_seqlens: Sequence[int] | None
    shared_prefix: int | None
    decode: DecodeOptions | None


@overload
def count(
    problem: Problem, *, level: Literal["requested"] = ..., **how: Unpack[_How]
) -> Traffic: ...


@overload
def count(
    problem: Problem, *, level: Literal["dram"], l2: L2Model | None = ..., **how: Unpack[_How]
) -> Dram: ...


@own_errors
def count(
    problem: Problem,
    *,
    algorithm: str = "flash2",
    direction: str = "forward",
    tiling: Tiling | None = None,
    device: str | Device = "H100",
    key_order: str = "ascending",
    splits: int | str | None = None,
    pack_gqa: bool | None = None,
    cache_seqlens: Sequence[int] | None = None,
    shared_prefix: int | None = None,
    decode: DecodeOptions | None = None,
    level: str = "requested",
    l2: L2Model | None = None,
) -> Traffic | Dram:
    """Count the bytes and FLOPs of an attention pass by formula, without data.

    The counts are integers, equal to those in the trace of `run(..., trace=True)`. For causal and
    windowed problems, counting takes time proportional to the number of row tiles.

    Parameters
    ----------
    problem : Problem
    algorithm, tiling, device, key_order
        As in `run`.
    decode : DecodeOptions, optional
        The options of "flash-decode", as in `run`. Pages and latent attention must also be part of
        the problem.
    splits, pack_gqa, cache_seqlens, shared_prefix
        Fields of `DecodeOptions`, in place of `decode`. `pack_gqa` (default: False) also applies to
        the forward pass of the "flash2" algorithms.
    direction : {"forward", "backward"}
    level : {"requested", "dram"}
        Which bytes to count: those of every tile transfer, or only those that miss in a model of
        the L2 cache.
    l2 : L2Model, optional
        With ``level="dram"``: launch order, blocks in flight, partitions (see `flashsim.l2`).

    Raises
    ------
    OptionError, DTypeError, SramOverflow, TilingError, UnsupportedError
        Also if there are more tiles than a schedule can list, or more scores than fit in 64 bits.
    """
    checks.one_of("level", level, LEVELS)
    if l2 is not None and level != "dram":
        raise OptionError(
            "l2= describes the L2 cache, which is simulated only with level='dram'; pass "
            "level='dram' too"
        )
    if not isinstance(problem, Problem):
        raise DTypeError(f"count() takes a flashsim.Problem, got {type(problem).__name__}")
    plans.stages(problem, algorithm, direction)
    inputs.check_tiling(tiling)
    device = Device.get(device)
    fields = {"splits": splits, "pack_gqa": pack_gqa, "cache_seqlens": cache_seqlens}
    fields = {**fields, "shared_prefix": shared_prefix}
    fields = {name: value for name, value in fields.items() if value is not None}
    inputs.check_decoding(algorithm, fields)
    fields = counted_fields(problem, with_fields(fields, decode, [algorithm]))
    caches = {name: fields.pop(name) for name in CACHES & fields.keys()}
    if caches:
        problem, _ = live_problem(problem, caches)
    if direction == "forward":
        tiling, split = choose(problem, tiling, device, algorithm, **fields)
    else:
        if fields.get("pack_gqa"):
            raise OptionError(
                "a backward pass packs no query heads; leave out pack_gqa=, or pass "
                "direction='forward'"
            )
        tiling, split = tiling or Tiling.fit(problem, device, algorithm, direction), WHOLE
    order = inputs.check_key_order(key_order)
    requested = traffic.count_schedule(problem, tiling, algorithm, direction, device, order, split)
    if level == "requested":
        return requested
    from flashsim.l2 import dram

    return dram(requested, l2)
