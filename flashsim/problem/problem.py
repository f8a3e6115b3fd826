"""Defines `Problem`, which describes the attention to compute, but not the algorithm.

Conventions (docs/reference/model.md): arrays are (batch, heads, sequence, head_dim). Causal masks
are aligned at the bottom right: the last query sees all keys. The limits in `window=(left, right)`
are inclusive, and -1 means no limit. Scores are ``score_mod(softcap(scale * q @ k.T) + bias)``, and
masks apply last. A score near the lowest finite number counts as masked (`masks.masked_score`). A
query that sees no key has out = 0 and lse = -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from flashsim import report
from flashsim.errors import (
    DTypeError,
    MaskError,
    OptionError,
    ShapeError,
    UnsupportedError,
    own_errors,
    shown,
)
from flashsim.functions.graph import Graph, check_extents
from flashsim.functions.mask import MaskFunction
from flashsim.functions.tracing import score_or_softcap
from flashsim.problem import checks
from flashsim.problem.masks import BlockMask, call_mask

#: The largest head_dim, which DeepSeek's latent attention needs.
MAX_HEAD_DIM = 576


@lru_cache(maxsize=32)
def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of this name; types that NumPy lacks come from `ml_dtypes`."""
    if name == "bfloat16" or name in checks.FP8:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


@dataclass(frozen=True)
class Segment:
    """One sequence of a packed batch: its query rows and key rows, as packed indices.

    A segment with `prefix` set is a shared prefix, whose keys the queries of all sequences see.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    prefix: bool = False

    @property
    def offset(self) -> int:
        """The index of a query's diagonal key minus the index of the query.

        The diagonal ends at the bottom right, with the last query and the last key. No key of a
        shared prefix lies to the right of the diagonal.
        """
        if self.prefix:
            return self.k_stop - 1 - self.q_start
        return self.k_stop - self.q_stop


@own_errors
@dataclass(frozen=True)
class Problem:
    """One attention problem: shapes, type, mask and scale. Frozen and hashable.

    Parameters
    ----------
    n_q, n_kv : int
        Query and key lengths; with `cu_seqlens_*`, the packed totals. `n_kv` defaults to `n_q`.
    head_dim, head_dim_v : int
        Elements per row of q and k, and per row of v (default: the same); 1 to 576.
    batch, heads, kv_heads : int
        `heads` must be a multiple of `kv_heads` (grouped-query attention); default: equal.
    dtype : str
        Element type of q, k and v in HBM: "float64", "float32", "float16", "bfloat16",
        "float8_e4m3fn" or "float8_e5m2". Results have the same type, or bfloat16 with FP8 inputs.
    causal : bool
        Keep key k for query q only if ``k <= q + n_kv - n_q``.
    window : (int, int), optional
        Keep keys from ``q + n_kv - n_q - left`` to ``q + n_kv - n_q + right``; -1 means no limit.
    softcap : float
        c > 0 replaces each scaled score s by ``c * tanh(s / c)``; 0 means no softcap.
    scale : float, optional
        Factor on Q K^T; default ``1 / sqrt(head_dim)``.
    cu_seqlens_q, cu_seqlens_k : sequence of int, optional
        Offsets of variable-length sequences packed along the sequence axis. They start at 0, never
        decrease, and end at n_q (n_kv). They need ``batch=1``. A query sees only keys of its own
        sequence.
    page_size : int, optional
        Keys per page, if K and V are in a paged cache. A block table of int32 numbers lists the
        pages of each batch entry. A page that two entries share is loaded, and counted, for both.
    shared_prefix : int
        The number of first keys that all packed sequences share, before their own keys. The offsets
        in `cu_seqlens_k` then start after the prefix. Attention over the prefix is computed once
        for all queries (cascade attention). Every query must see the whole prefix.
    latent : bool
        V is the first `head_dim_v` columns of K, so one load reads both. This is latent attention
        (MLA of DeepSeek-V2, arXiv:2405.04434) in its absorbed form: one key head of 576 columns, of
        which V is the first 512.
    scales : "tensor", "head" or (int, int), optional
        FP8 inputs are multiplied by float32 scales: one per tensor, one per head, or one per block
        of a head. (int, int) are the query rows and the key rows per block (see
        `flashsim.quantize`).
    bias : (int, int), optional
        Leading shape, (1 or batch, 1 or heads), of an additive bias (.., .., n_q, n_kv).
    block_mask : BlockMask, optional
        The cells of the score matrix whose scores are kept.
    dlse : bool
        Whether the loss also depends on the LSE. A backward pass then reads the LSE's gradient.
    mask : callable, optional
        ``mask(q_index, k_index)`` gets integer arrays that broadcast against each other, with
        indices from the start of each sequence. It returns booleans: True keeps the score.
    mask_mod : callable, optional
        ``mask_mod(b, h, q, k)``, with FlexAttention's signature, for one score: batch entry, query
        head, and indices from the start of each sequence. It is traced once. So tiles are
        classified without evaluating every score, and every engine can run it (see
        `flashsim.functions`).
    score_mod : callable, optional
        ``score_mod(score, b, h, q, k)`` returns the score that replaces the scaled score. It is
        traced too. A problem keeps only its expressions; the captured arrays are passed to `run`.
        A function that only caps the scores becomes `softcap`; `dataclasses.replace` keeps it.
    score_grads : tuple of str
        The captured arrays of `score_mod` for which a backward pass computes gradients.
    sinks : bool
        Whether each query head has a learnable sink: an additional score in each row's softmax,
        without a row of V.

    Raises
    ------
    ShapeError, DTypeError, OptionError, MaskError
        If an argument is invalid. The message names the argument, its value and the valid values.
    """

    n_q: int
    n_kv: int = None  # type: ignore[assignment]  # filled in below
    head_dim: int = 64
    head_dim_v: int = None  # type: ignore[assignment]  # filled in below
    batch: int = 1
    heads: int = 1
    kv_heads: int = None  # type: ignore[assignment]  # filled in below
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    scale: float = None  # type: ignore[assignment]  # filled in below
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None
    bias: tuple[int, int] | None = None
    block_mask: BlockMask | None = None
    mask: Callable[..., Any] | None = None
    page_size: int | None = None
    shared_prefix: int = 0
    latent: bool = False
    scales: str | tuple[int, int] | None = None
    dlse: bool = False
    mask_mod: Any = None
    score_mod: Any = None
    score_grads: tuple[str, ...] = ()
    sinks: bool = False

    _repr_html_ = report.card

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        for name, default in (
            ("n_kv", self.n_q),
            ("head_dim_v", self.head_dim),
            ("kv_heads", self.heads),
        ):
            if getattr(self, name) is None:
                put(name, default)
        for name in ("n_q", "n_kv", "head_dim", "head_dim_v", "batch", "heads", "kv_heads"):
            put(name, checks.positive_int(name, getattr(self, name)))
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) > MAX_HEAD_DIM:
                raise ShapeError(
                    f"{name} must be between 1 and {MAX_HEAD_DIM}, got {getattr(self, name)}"
                )
        if self.heads % self.kv_heads:
            raise ShapeError(
                "the number of query heads must be a multiple of the number of KV heads, got "
                f"heads={self.heads}, kv_heads={self.kv_heads}"
            )
        put("latent", checks.flag("latent", self.latent))
        if self.latent and self.head_dim_v > self.head_dim:
            raise ShapeError(
                f"head_dim_v must be at most head_dim={self.head_dim}, because V is the first "
                f"columns of K, got {self.head_dim_v}"
            )
        put("dlse", checks.flag("dlse", self.dlse))
        put("dtype", checks.dtype_name(self.dtype))
        put("causal", checks.flag("causal", self.causal))
        put("window", checks.window(self.window))
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        put("softcap", self._factor("softcap", self.softcap, low=0.0))
        put("scale", self._factor("scale", scale))
        if self.score_mod is not None:
            alone = self.bias is None and not self.softcap  # both come before the function
            graph, cap = score_or_softcap(self.score_mod, self.compute_dtype, alone=alone)
            put("score_mod", graph)
            put("softcap", cap or self.softcap)
        put("shared_prefix", checks.count("shared_prefix", self.shared_prefix))
        self._check_sequences(put)
        if self.page_size is not None:
            put("page_size", checks.positive_int("page_size", self.page_size))
        if self.shared_prefix:
            self._check_prefix(self.shared_prefix)
        put("scales", self._check_scales())
        if self.bias is not None:
            allowed = ((1, self.batch), (1, self.heads))
            lead = tuple(self.bias) if isinstance(self.bias, (tuple, list)) else ()
            if len(lead) != 2 or not all(
                checks.is_int(x) and x in ok for x, ok in zip(lead, allowed, strict=True)
            ):
                raise ShapeError(
                    "a Problem's bias= must be the first two sides of the bias's shape, (1 or "
                    f"{self.batch}, 1 or {self.heads}), got {shown(self.bias)}"
                )
            put("bias", (int(lead[0]), int(lead[1])))
        if self.block_mask is not None:
            self._check_block_mask()
        if self.mask is not None and not callable(self.mask):
            raise MaskError(
                "mask must be a function mask(q_index, k_index), got "
                f"{type(self.mask).__name__}; pass a boolean grid of tiles as block_mask=, or an "
                "array that is added to the scores as bias="
            )
        self._check_functions(put)
        try:
            hash(self.mask)
        except TypeError:
            raise MaskError(
                "mask= must be hashable, because schedules are cached per problem, got an "
                f"unhashable {type(self.mask).__name__}; pass a function or an instance of a "
                "frozen dataclass, which are hashable"
            ) from None

    def _check_functions(self, put: Callable[[str, Any], None]) -> None:
        """Trace the mask function, and check that captured arrays are large enough."""
        put("sinks", checks.flag("sinks", self.sinks))
        if self.mask_mod is not None:
            put("mask_mod", MaskFunction.of(self.mask_mod))
            check_extents(self.mask_mod.graph, **self._extents())
        if self.score_mod is not None:
            check_extents(self.score_mod, **self._extents())
        able = [] if self.score_mod is None else [a.name for a in self.score_mod.differentiable]
        wanted = tuple(self.score_grads)
        for name in wanted:
            checks.one_of("score_grads", name, able)
        put("score_grads", tuple(name for name in able if name in wanted))

    def _extents(self) -> dict[str, int]:
        """Return how many values the arguments b, h, q and k of a user's function can have."""
        longest_q = max(s.q_stop - s.q_start for s in self.sequences)
        longest_k = max(s.k_stop - s.k_start for s in self.sequences)
        return {"b": self.batch, "h": self.heads, "q": longest_q, "k": longest_k}

    def _factor(self, name: str, value: Any, low: float = -math.inf) -> float:
        """Return `scale` or `softcap` as a float; raise unless the type of scores can hold it."""
        number, limits = checks.number(name, value, low), np.finfo(self.compute_dtype)
        largest, least = float(limits.max), float(limits.tiny)
        if abs(number) > largest or (name == "softcap" and 0 < number < least):
            raise OptionError(
                f"{name} must be within the range of {self.compute_dtype} ({least:.3g} to "
                f"{largest:.3g}), the type in which scores of {self.dtype} inputs are computed, "
                f"got {shown(value)}"
            )
        return number

    def _check_sequences(self, put: Callable[[str, Any], None]) -> None:
        if (self.cu_seqlens_q is None) != (self.cu_seqlens_k is None):
            raise ShapeError("cu_seqlens_q and cu_seqlens_k must be passed together, got only one")
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return
        lengths = self.batch, self.n_q, self.n_kv, self.shared_prefix
        q, k = checks.packed(self.cu_seqlens_q, self.cu_seqlens_k, *lengths)
        put("cu_seqlens_q", q)
        put("cu_seqlens_k", k)

    def _check_prefix(self, prefix: int) -> None:
        """Raise an error unless all queries see the shared prefix, and it fills complete pages."""
        if self.cu_seqlens_q is None:
            raise ShapeError(
                f"shared_prefix={shown(prefix)} applies only to packed sequences; pass "
                "cu_seqlens_q= and cu_seqlens_k= too, as flashsim.run and flashsim.count do for "
                "a batch"
            )
        for name in ("window", "bias", "block_mask", "mask", "mask_mod", "score_mod"):
            if getattr(self, name) is not None:
                raise UnsupportedError(
                    f"shared_prefix cannot be combined with {name}, because every query must see "
                    f"the whole prefix; leave out shared_prefix= or {name}="
                )
        if self.page_size is not None and prefix % self.page_size:
            raise ShapeError(
                f"shared_prefix must be a multiple of page_size={self.page_size}, got {prefix}; "
                f"use {prefix // self.page_size * self.page_size}"
            )
        for n, s in enumerate(self.sequences[1:]):
            if self.causal and s.q_stop - s.q_start > s.k_stop - s.k_start + 1:
                raise ShapeError(
                    f"sequence {n} has {s.q_stop - s.q_start} queries, but only "
                    f"{s.k_stop - s.k_start} keys after the shared prefix, so under the causal "
                    "mask its first query does not see the whole prefix; use a shorter prefix"
                )

    def _check_scales(self) -> str | tuple[int, int] | None:
        scales = self.scales
        if scales is None:
            return None
        if self.dtype not in checks.FP8:
            raise OptionError(
                f"scales= works only with FP8 inputs ({' or '.join(checks.FP8)}), got "
                f"dtype={self.dtype!r}; leave out scales="
            )
        if isinstance(scales, str):
            return checks.one_of("scales", scales, ("tensor", "head"))
        if not isinstance(scales, (tuple, list)) or len(scales) != 2:
            raise OptionError(
                "scales= must be 'tensor', 'head' or a block's size (query rows, key rows), got "
                f"{shown(scales)}"
            )
        if self.cu_seqlens_q is not None:
            raise UnsupportedError(
                "with packed sequences, a block of scales would contain rows of two sequences; "
                "use scales='head'"
            )
        names = "query rows of a scale", "key rows of a scale"
        rows, keys = (checks.positive_int(n, x) for n, x in zip(names, scales, strict=True))
        return rows, keys

    def _check_block_mask(self) -> None:
        mask = self.block_mask
        if not isinstance(mask, BlockMask):
            raise DTypeError(
                "block_mask must be a flashsim.BlockMask(grid, block_q, block_k), got "
                f"{type(mask).__name__}"
            )
        longest = self._extents()
        longest_q, longest_k = longest["q"], longest["k"]
        need = -(-longest_q // mask.block_q), -(-longest_k // mask.block_k)
        if mask.grid.shape != need:
            raise ShapeError(
                f"a block_mask whose blocks have {mask.block_q} x {mask.block_k} scores must "
                f"have shape {need} to cover {longest_q} x {longest_k} scores, got "
                f"{mask.grid.shape}"
            )

    # -- properties computed from the fields ----------------------------------------------------

    @property
    def has_functions(self) -> bool:
        """Whether the problem has a mask function, a score function or sinks."""
        return self.mask_mod is not None or self.score_mod is not None or self.sinks

    @property
    def mask_graph(self) -> Graph | None:
        """The mask function's traced expression, or None if the problem has no mask function."""
        return None if self.mask_mod is None else self.mask_mod.graph

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes per element of q, k or v in HBM."""
        return numpy_dtype(self.dtype).itemsize

    @cached_property
    def fp8(self) -> bool:
        """Whether the inputs q, k and v have an FP8 type, which takes one byte per element."""
        return self.dtype in checks.FP8

    @cached_property
    def result_dtype(self) -> str:
        """Type of out, gradients and scores in HBM: the inputs' type, or bfloat16 for FP8."""
        return "bfloat16" if self.fp8 else self.dtype

    @property
    def result_itemsize(self) -> int:
        """Bytes per element of out, dout, a gradient or a bias in HBM."""
        return numpy_dtype(self.result_dtype).itemsize

    @property
    def compute_dtype(self) -> str:
        """Type of accumulators and statistics: float32, or float64 for a float64 problem."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def compute_itemsize(self) -> int:
        """Bytes per element of an accumulator or a statistic (LSE, delta)."""
        return np.dtype(self.compute_dtype).itemsize

    @cached_property
    def sequences(self) -> tuple[Segment, ...]:
        """The shared prefix, if any, and the packed sequences (one without `cu_seqlens`)."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return (Segment(0, self.n_q, 0, self.n_kv),)
        q, k = self.cu_seqlens_q, self.cu_seqlens_k
        prefix = (Segment(0, self.n_q, 0, k[0], prefix=True),) if self.shared_prefix else ()
        own = (Segment(q[s], q[s + 1], k[s], k[s + 1]) for s in range(len(q) - 1))
        return (*prefix, *own)

    @property
    def pages(self) -> int:
        """The number of block-table entries that the batch's live keys use, or 0 if unpaged."""
        size = self.page_size
        if size is None:
            return 0
        return self.batch * sum(-(-(s.k_stop - s.k_start) // size) for s in self.sequences)

    @property
    def left(self) -> int:
        """How many keys a query sees left of the diagonal; `n_q + n_kv` without a limit."""
        return self._side(0)

    @property
    def right(self) -> int:
        """How many keys a query sees right of the diagonal; 0 with a causal mask."""
        return 0 if self.causal else self._side(1)

    def _side(self, which: int) -> int:
        unlimited = self.n_q + self.n_kv
        if self.window is None or self.window[which] < 0:
            return unlimited
        return min(self.window[which], unlimited)

    @property
    def banded(self) -> bool:
        """Whether each query sees contiguous keys: the only masks are causality and a window."""
        return self.block_mask is None and self.mask is None and self.mask_mod is None

    def rounded(self, array: np.ndarray) -> np.ndarray:
        """Return `array` rounded to the results' type, in the accumulators' type."""
        if self.result_dtype == self.compute_dtype:
            return array
        return array.astype(numpy_dtype(self.result_dtype)).astype(array.dtype)

    def keep(
        self, sequence: Segment, q: np.ndarray, k: np.ndarray, *, functions: bool = True
    ) -> np.ndarray:
        """Return booleans (len(q), len(k)): True for each score (query, key) that the masks keep.

        `q` (queries) and `k` (keys) are packed indices of one sequence. If `mask_mod` differs
        between batch entries or heads, a score counts as kept if any entry or head keeps it.
        ``functions=False`` ignores `mask_mod`.

        Raises
        ------
        MaskError
            If the user's `mask` fails, or does not return one boolean per score.
        """
        q_local, k_local = q[:, None] - sequence.q_start, k[None, :] - sequence.k_start
        rel = k[None, :] - (q[:, None] + sequence.offset)
        kept = self.keep_alike(q_local, k_local, rel)
        if self.mask_mod is not None and functions:
            kept &= self.keep_per_head(q_local, k_local).any(axis=(0, 1))
        return kept

    def keep_alike(self, q: np.ndarray, k: np.ndarray, rel: np.ndarray) -> np.ndarray:
        """Return booleans, True for scores that the masks common to all heads keep.

        `q` and `k` count from the start of a sequence, and are broadcast. `rel` is the distance of
        each key from the query's diagonal.
        """
        kept = (rel >= -self.left) & (rel <= self.right)
        if self.block_mask is not None:
            b = self.block_mask
            cell_q, cell_k = min(b.block_q, self.n_q), min(b.block_k, self.n_kv)
            kept &= b.grid[q // cell_q, k // cell_k]
        if self.mask is not None:
            kept &= call_mask(self.mask, q, k)
        return kept

    def keep_per_head(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Return booleans (1 or batch, 1 or heads, ...): True where `mask_mod` keeps the score.

        `q` and `k` are indices from the start of a sequence, and broadcast against each other.
        """
        mask, shape = self.mask_mod, np.broadcast_shapes(q.shape, k.shape)
        h = np.arange(self.heads if "h" in mask.per_head else 1).reshape(-1, *(1,) * len(shape))
        b = np.arange(self.batch if "b" in mask.per_head else 1).reshape(-1, *(1,) * h.ndim)
        shape = b.shape[0], h.shape[0], *shape
        return np.broadcast_to(mask.keep(b, h, q, k), shape)
