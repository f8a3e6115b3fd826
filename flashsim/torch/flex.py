"""`flex_attention`: runs torch's FlexAttention, with unchanged functions, on flashsim's engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from flashsim.errors import (
    DTypeError,
    MaskError,
    OptionError,
    ShapeError,
    UnsupportedError,
    shown,
)
from flashsim.functions.mask import MaskFunction
from flashsim.functions.tracing import trace_mask, trace_score
from flashsim.problem import checks
from flashsim.problem.problem import Problem
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tables import FULL
from flashsim.schedule.tiling import Tiling
from flashsim.torch import flex_compiled, ops
from flashsim.torch.functional import check_sinks, default_backend, taken

Tensors = tuple[Tensor, Tensor, Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """Compute attention with a score function and a mask, like torch's `flex_attention`.

    On the CPU and on a GPU, query, key, value, sinks and each captured tensor of `score_mod` with
    ``requires_grad`` get gradients. `flex_attention` works under ``torch.compile(fullgraph=True)``.

    Parameters
    ----------
    query, key, value : Tensor, (batch, heads, n, head_dim)
    score_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx)``, as in torch.
    block_mask : BlockMask or callable, optional
        The result of torch's `create_block_mask`, or ``mask_mod(b, h, q_idx, kv_idx)`` itself.
        Blocks that a `BlockMask` does not list are masked, whatever the mask function returns.
    scale : float, optional
        Default: ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        Whether query may have more heads than key and value.
    return_lse : bool
        Return ``(out, lse)``; both have gradients.
    kernel_options : dict, optional
        Options of torch's kernels, which are ignored here.
    return_aux : AuxRequest, optional
        Return ``(out, AuxOutput)``, as in torch; ``AuxRequest(lse=True)`` requests the LSE.
    sinks : Tensor, (heads,), optional
        A learnable score per head without a value, as in GPT-OSS.
    backend : str, optional
        As in `flashsim.torch.attention`.

    Raises
    ------
    FlashSimError
        If a function cannot be traced, the error is a `FunctionError`, which names the line.
    """
    enable_gqa = checks.flag("enable_gqa", enable_gqa)
    return_lse = checks.flag("return_lse", return_lse)
    if return_aux is not None:
        _check_aux(return_aux, return_lse)
    query, key, value = taken(query=query, key=key, value=value)
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ShapeError(
            "query, key and value must all have 4 axes, (batch, heads, n, head_dim), got "
            f"{query.ndim}, {key.ndim} and {value.ndim} axes"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise OptionError(
            f"query has {query.shape[1]} heads, but key has {key.shape[1]} heads; pass "
            "enable_gqa=True"
        )
    batch = query.shape[0]
    if key.shape[0] == 1 < batch:  # torch broadcasts a batch of 1
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    if sinks is not None:
        check_sinks(sinks, query)
    compiles = torch.compiler.is_dynamo_compiling() and flex_compiled.known()
    attend = _compiled if compiles else uncompiled
    backend = default_backend(query) if backend is None else backend
    out, lse = attend((query, key, value), score_mod, block_mask, scale, sinks, backend)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _check_aux(return_aux: Any, return_lse: bool) -> None:
    if not isinstance(return_aux, AuxRequest):
        raise DTypeError(f"return_aux must be an AuxRequest, got {shown(return_aux)}")
    if return_lse:
        raise OptionError(
            "return_lse and return_aux were both passed; pass only "
            "return_aux=AuxRequest(lse=True), because torch deprecates return_lse"
        )
    if return_aux.max_scores:
        raise UnsupportedError(
            "flashsim.torch.flex_attention does not return the largest scores; pass "
            "return_aux=AuxRequest(lse=True)"
        )


def uncompiled(
    qkv: Tensors, score_mod: Any, block_mask: Any, scale: float | None, sinks: Any, backend: str
) -> tuple[Tensor, Tensor]:
    """Compute `flex_attention` of checked arguments in eager mode, and return out and lse."""
    if isinstance(qkv[0], FakeTensor):
        raise UnsupportedError(
            "flashsim.torch.flex_attention reads numbers, but query is a FakeTensor, which has "
            "none; to export a program, pass strict=True to torch.export.export"
        )
    mask = None if block_mask is None else _mask(block_mask, *qkv[:2])
    return with_functions(qkv, score_mod, mask, sinks, scale, backend)


def with_functions(
    qkv: Tensors,
    score_mod: Callable[..., Any] | None,
    mask: MaskFunction | None,
    sinks: Tensor | None,
    scale: float | None,
    backend: str,
    deterministic: bool | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention of 4-D tensors with a score and a mask function; return out and lse."""
    score = None if score_mod is None else trace_score(score_mod)
    wanted = []
    if score is not None:
        pairs = zip(score.graph.arrays, score.arrays, strict=True)
        wanted = [(a.name, x) for a, x in pairs if isinstance(x, Tensor) and x.requires_grad]
    told = {"score_mod": score, "mask_mod": mask, "scale": scale, "backend": backend, **more}
    passes = _Passes(told, sinks is not None, [name for name, _ in wanted], deterministic)
    given = [] if sinks is None else [sinks]
    return ops.Attend.apply(passes, *qkv, *given, *(x for _, x in wanted))


flex_compiled.compiled.otherwise = uncompiled


def _compiled(
    qkv: Tensors, score_mod: Any, block_mask: Any, scale: float | None, sinks: Any, backend: str
) -> tuple[Tensor, Tensor]:
    """Call `flex_compiled.compiled` from code that Dynamo, torch.compile's tracer, traces."""

    def plain(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score

    def everything(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q == q

    mask = everything if block_mask is None else block_mask
    if _is_block_mask(mask, *qkv[:2]):
        mask = _of_blocks(block_mask)
    score = plain if score_mod is None else score_mod
    return flex_compiled.compiled(*qkv, score, (sinks, mask), scale, {"backend": backend})


@dataclass(frozen=True)
class _Passes:
    """Runs the passes of `flex_attention` in eager mode, for `ops.Attend`.

    `told` has the keywords of `flashsim.run` except the sinks. The optional tensors are the sinks,
    with `sinks`, and the captured arrays that get a gradient, whose names are `wanted`.
    """

    told: dict[str, Any]
    sinks: bool
    wanted: list[str]
    deterministic: bool | None
    mapped = staticmethod(ops.no_vmap)

    @property
    def moved(self) -> list[bool]:
        return [True] * (self.sinks + len(self.wanted))

    def _keywords(self, more: Sequence[Tensor]) -> dict[str, Any]:
        return {**self.told, "sinks": more[0].detach()} if self.sinks else self.told

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        return ops.run(q, k, v, **self._keywords(more))

    def backward(self, *tensors: Any) -> list[Tensor]:
        dout, out, lse, dlse, q, k, v, *more = tensors
        how = {"deterministic": self.deterministic, "captured": self.wanted}
        found = ops.run_backward(q, k, v, out, lse, dout, dlse=dlse, **how, **self._keywords(more))
        dsinks = [found.dsinks.to(more[0].dtype)] if self.sinks else []
        captured = [found.captured[name] for name in self.wanted]
        return [found.dq, found.dk, found.dv, *dsinks, *captured]


def _mask(block_mask: Any, query: Tensor, key: Tensor) -> MaskFunction:
    """Return the mask function of torch's `BlockMask`, or of a plain function."""
    if not _is_block_mask(block_mask, query, key):
        return MaskFunction.of(block_mask)
    mask = MaskFunction.of(block_mask.mask_mod)
    if _same_tiles(mask, block_mask, query, key):
        return mask
    return MaskFunction(*trace_mask(_of_blocks(block_mask)))


def _is_block_mask(block_mask: Any, query: Tensor, key: Tensor) -> bool:
    """Return True for a `BlockMask` and False for a function; raise MaskError for anything else."""
    if not hasattr(block_mask, "kv_num_blocks"):
        if not callable(block_mask):
            raise MaskError(
                f"block_mask must be a BlockMask or a function (b, h, q_idx, kv_idx), got "
                f"{shown(block_mask)}"
            )
        return False
    n_q, n_kv = query.shape[2], key.shape[2]
    made_for = tuple(getattr(block_mask, "seq_lengths", (n_q, n_kv)))
    if made_for != (n_q, n_kv):
        raise ShapeError(
            f"block_mask was made for {made_for[0]} x {made_for[1]} scores, but query and key "
            f"have {n_q} x {n_kv} scores; create the block_mask for these lengths"
        )
    return True


def _of_blocks(block_mask: Any) -> Callable[..., Any]:
    """Return a `BlockMask`'s mask function, limited to the blocks that the `BlockMask` lists."""
    listed, full = _blocks(block_mask)
    size_q, size_k = block_mask.BLOCK_SIZE
    function, last_b, last_h = block_mask.mask_mod, listed.shape[0] - 1, listed.shape[1] - 1

    def blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
        at = (b if last_b else 0, h if last_h else 0, q // size_q, k // size_k)
        return full[at] | (listed[at] & function(b, h, q, k))

    return blocks


def _blocks(block_mask: Any) -> tuple[Tensor, Tensor]:
    """Return two boolean tensors: the blocks in a `BlockMask`, and the blocks listed as full.

    The boolean tensors have the shape (batch, heads, block rows, block columns).
    """
    listed = _dense(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is None:
        return listed, torch.zeros_like(listed)
    full = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return listed | full, full


def _dense(counts: Tensor, indices: Tensor) -> Tensor:
    """Return one boolean per block of scores, from lists of each block row's kept columns."""
    columns = indices.shape[-1]
    number = torch.arange(columns, device=indices.device)
    at = torch.where(number < counts[..., None], indices, columns).long()
    listed = torch.zeros((*indices.shape[:-1], columns + 1), device=indices.device)
    return listed.scatter(-1, at, 1.0)[..., :columns] > 0


def _same_tiles(mask: MaskFunction, block_mask: Any, query: Tensor, key: Tensor) -> bool:
    """Return True if a mask function alone keeps exactly the scores that a `BlockMask` keeps.

    A `BlockMask` that lists other blocks for other heads or batch entries gives False, because the
    schedule has one list of tiles for all of them.
    """
    problem = Problem(
        *(query.shape[2], key.shape[2]), batch=query.shape[0], heads=query.shape[1], mask_mod=mask
    )
    schedule = Schedule(problem, Tiling(*block_mask.BLOCK_SIZE))
    ptr, col, kind = schedule.row_csr
    visited, whole = np.zeros((2, schedule.t_r, schedule.t_c), bool)
    at = np.repeat(np.arange(schedule.t_r), np.diff(ptr)), col
    visited[at], whole[at] = True, kind == FULL
    listed, full = (
        x.flatten(0, 1)[:, : schedule.t_r, : schedule.t_c].cpu().numpy()
        for x in _blocks(block_mask)
    )
    return bool((listed == visited).all() & (full <= whole).all())
