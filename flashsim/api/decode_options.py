"""`DecodeOptions`: how a decoding call splits the keys, and what its KV cache holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim.api.kv_cache import check_table_kind
from flashsim.errors import DTypeError, OptionError, ShapeError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.live_keys import read_lengths
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.split import check_splits

#: The largest numbers that count as few: queries per head, and rows of all query heads of a group.
_FEW, _FEW_ROWS = 16, 128


def few_queries(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> bool:
    """Return True if arrays of these shapes have so few queries that decode kernels run the call.

    The shapes are (batch, heads, n, head_dim). The decode kernels take 16-bit types only.
    """
    _, heads, n, head_dim = q
    return (
        0 < n <= _FEW
        and 0 not in (*q, *k, *v)
        and n <= k[2] == v[2]
        and heads * n <= _FEW_ROWS * k[1]
        and max(head_dim, v[3]) <= 256
    )


@own_errors
@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeOptions:
    """The options of ``algorithm="flash-decode"``, checked when the object is created.

    Pass the object to `run`, `compare`, `count` or `predict` as ``decode=``. `run`, `compare`,
    `count` and `predict` also take each field as a keyword of the same name. Arrays are kept by
    reference, so a server can change the cache's lengths in place between calls. Two
    `DecodeOptions` are equal only if they are the same object.

    Attributes
    ----------
    splits : int, "auto" or "fa3"
        The number of splits of the keys. "auto" fills the device's SMs once; "fa3" ("simulator" and
        `count` only) is FlashAttention-3's rule.
    pack_gqa : bool
        Whether the query heads of a KV head share a tile, so that K and V are loaded once for all
        of them. "cupy" supports only True.
    cache_seqlens : sequence or array of int, (batch,), optional
        The number of live keys per batch entry. The causal mask is aligned to their end. Default:
        the whole cache.
    shared_prefix : int, optional
        The number of equal keys with which all entries begin; these keys are read once (cascade
        attention). With a `block_table`, these keys must fill whole pages.
    block_table : array of int, (batch, max_pages), optional
        Row b lists the pages that hold the keys of entry b; k and v are then (pages, kv_heads,
        page_size, head_dim). `count` and `predict` take the page size from the problem.
    head_dim_v : int, optional
        V is the first `head_dim_v` columns of k, and v is None (latent attention).
    workspace : flashsim.backends.cupy_gpu.decode.Workspace, optional
        "cupy" only: memory for partial results, which several calls can share.

    Raises
    ------
    OptionError, DTypeError, ShapeError
        For a value that no cache allows. Whether the lengths and pages fit the arrays is checked
        by the call.
    """

    splits: int | str = "auto"
    pack_gqa: bool = True
    cache_seqlens: Sequence[int] | Any = None
    shared_prefix: int | None = None
    block_table: Any = None
    head_dim_v: int | None = None
    workspace: Any = None

    def __post_init__(self) -> None:
        check_splits(self.splits)
        object.__setattr__(self, "pack_gqa", checks.flag("pack_gqa", self.pack_gqa))
        if self.shared_prefix is not None:
            checks.count("shared_prefix", self.shared_prefix)
        if self.head_dim_v is not None:
            checks.positive_int("head_dim_v", self.head_dim_v)
        if self.cache_seqlens is not None:
            _check_lengths(self.cache_seqlens)
        if self.block_table is not None:
            check_table_kind(self.block_table)

    def keywords(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, as keywords of `run`."""
        chosen = {name: x for name, x in vars(self).items() if x is not None and x is not True}
        if isinstance(self.splits, str) and self.splits == "auto":
            del chosen["splits"]
        return chosen


def _check_lengths(lengths: Any) -> None:
    """Raise unless `lengths` is one integer per batch entry; an array on a GPU is not read."""
    if hasattr(lengths, "shape") and hasattr(lengths, "dtype"):
        kind = str(lengths.dtype).removeprefix("torch.")
        if len(lengths.shape) != 1 or not kind.startswith(("int", "uint")):
            raise ShapeError(
                f"cache_seqlens must be integers, one per batch entry, got an array of {kind} of "
                f"shape {tuple(lengths.shape)}"
            )
        if not isinstance(lengths, np.ndarray):
            return
    for b, n in enumerate(read_lengths(lengths)):
        if n < 0:
            raise OptionError(f"cache_seqlens[{b}] must be at least 0, got {n}")


def with_fields(options: Mapping[str, Any], decode: Any, algorithms: Iterable[str]) -> Any:
    """Return a call's keywords plus the fields of its `DecodeOptions`; raise if they conflict."""
    if decode is None:
        return options
    if not isinstance(decode, DecodeOptions):
        raise DTypeError(f"decode must be a flashsim.DecodeOptions, got {shown(decode)}")
    names = list(algorithms)
    if not any(plans.splits_keys(plans.check_algorithm(name)) for name in names):
        raise OptionError(
            "decode= works only with algorithm='flash-decode', which splits the keys; leave out "
            f"decode= for {names[0]!r}, which does not split them"
        )
    fields = decode.keywords()
    for name in DecodeOptions.__dataclass_fields__:
        if options.get(name) is not None:
            raise OptionError(
                f"{name}= was passed in addition to decode=; set it in "
                f"decode=flashsim.DecodeOptions({name}=...) instead"
            )
    return {**options, **fields}


def counted_fields(problem: Problem, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the decoding options for `count`; raise if they contradict the problem's fields."""
    rest = dict(fields)
    rest.pop("workspace", None)
    if rest.pop("block_table", None) is not None and problem.page_size is None:
        raise OptionError(
            "decode= has a block_table, but the problem has no page_size; pass "
            "Problem(page_size=...), or leave block_table= out of DecodeOptions"
        )
    width = rest.pop("head_dim_v", None)
    if width is not None and not (problem.latent and problem.head_dim_v == width):
        raise OptionError(
            f"decode= has head_dim_v={width}, so V is the first {width} columns of K, but the "
            f"problem is not latent; pass Problem(latent=True, head_dim_v={width}), or leave "
            "head_dim_v= out of DecodeOptions"
        )
    return rest
