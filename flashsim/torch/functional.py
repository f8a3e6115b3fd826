"""The functions that a model calls: `attention`, and `FlashAttention` as an autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashsim.api import scales
from flashsim.api.arrays import last_axes, name_of
from flashsim.api.dispatch import backend_name
from flashsim.errors import DTypeError, ShapeError, UnsupportedError, reject_unknown, shown
from flashsim.problem import checks
from flashsim.torch import direct, ops
from flashsim.torch.ops import Options

ALGORITHMS = ("flash2", "flash2-fused")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    algorithm: str = "flash2",
    deterministic: bool | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """Compute ``softmax(mask(softcap(scale q k^T) + bias)) v`` as a torch operator with a gradient.

    The operator works under autograd, ``torch.compile(fullgraph=True)``, ``torch.func.grad`` and
    ``vmap``, and on the meta device. Autocast casts q, k, v and bias, as it does for torch's own
    attention. The backward pass needs only the inputs, out and the LSE (one number per row).

    Parameters
    ----------
    q : Tensor, (batch, heads, n_q, head_dim); leading axes may be left out
    k, v : Tensor, (batch, kv_heads, n_kv, head_dim) and (batch, kv_heads, n_kv, head_dim_v)
        `heads` must be a multiple of `kv_heads`. On the CPU float64, float32, float16 or bfloat16;
        on a GPU not float64.
    causal, window, softcap, scale, bias, sinks
        As in `flashsim.run`. `causal` is bottom-right aligned, so a single query sees the whole KV
        cache. The bias and the sinks, (heads,), have gradients. On a GPU packed sequences take no
        bias.
    cu_seqlens_q, cu_seqlens_k : Tensor or sequence of int, optional
        As in `flashsim.Problem`. They are read on the host. On a GPU, pass a sequence or a CPU
        tensor: it saves a synchronisation, and CUDA graphs need it.
    algorithm : {"flash2", "flash2-fused"}
    deterministic : bool, optional
        As in `flashsim.Result.backward`.
    backend : str, optional
        "simulator" or "numba" for CPU tensors, "cupy" or "numba_cuda" for CUDA ones. Default:
        "numba" and "cupy".
    return_lse : bool
        Return ``(out, lse)``. The LSE, (batch, heads, n_q), has a gradient too. Results for splits
        of the keys can be merged by their LSE, and a loss may use the LSE.

    Returns
    -------
    Tensor, shaped like q with v's head_dim

    Raises
    ------
    FlashSimError
        For arguments that flashsim does not support.
    """
    if unknown:
        reject_unknown(unknown, attention.__kwdefaults__ or (), "attention")
    return_lse = checks.flag("return_lse", return_lse)
    plain, key = bias is sinks is cu_seqlens_q is cu_seqlens_k is None, ()
    if plain and not torch.compiler.is_compiling():
        if torch._C._is_any_autocast_enabled():
            q, k, v = map(autocast, taken(q=q, k=k, v=v))
        asked = causal, window, softcap, scale, algorithm, deterministic, backend
        call, key = direct.known(q, k, v, asked)
        if call is not None:
            return direct.attend(call, q, k, v, with_lse=return_lse)
    q, k, v, *added = taken(q=q, k=k, v=v, **({} if bias is None else {"bias": bias}))
    scales.refuse(name_of(q.dtype), "flashsim.torch.attention")
    if algorithm not in ALGORITHMS:
        raise UnsupportedError(
            f"flashsim.torch.attention runs {' and '.join(ALGORITHMS)}, not {algorithm!r}; use "
            "flashsim.run, which simulates every algorithm"
        )
    if sinks is not None:
        check_sinks(sinks, q)
    backend = default_backend(q) if backend is None else backend_name(backend)
    if not torch.compiler.is_compiling():  # numbers are symbols now; the engine checks them later
        causal = checks.flag("causal", causal)
        window = checks.window(window)
        softcap = checks.number("softcap", softcap, low=0.0)
        scale = None if scale is None else checks.number("scale", scale)
        if deterministic is not None:
            deterministic = checks.flag("deterministic", deterministic)
    left, right = (-1, -1) if window is None else window
    scores = causal, left, right, softcap, scale
    question = Options(*scores, algorithm, deterministic, backend)
    if key:
        call = direct.first(key, q, k, v, question)
        return direct.attend(call, q, k, v, with_lse=return_lse)
    optional = {
        "bias": _expand(added[0]) if added else None,
        "cu_seqlens_q": _offsets("cu_seqlens_q", cu_seqlens_q),
        "cu_seqlens_k": _offsets("cu_seqlens_k", cu_seqlens_k),
        "sinks": sinks,
    }
    more = {name: x for name, x in optional.items() if x is not None}
    given = (*map(_expand, (q, k, v)), *more.values())
    out, lse = direct.general(ops.OpCall.of(question, [*more]), *given)
    out, lse = (x.reshape(x.shape[4 - q.ndim :]) for x in (out, lse))
    return (out, lse) if return_lse else out


def taken(**tensors: Any) -> list[Tensor]:
    """Check that tensors are dense, 2-D to 4-D and on one device; return the autocast tensors."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise DTypeError(
                f"{name} must be a torch.Tensor, got {type(x).__name__}; use flashsim.run, which "
                "takes other arrays"
            )
        if x.is_nested or x.layout != torch.strided:
            kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise UnsupportedError(
                f"{name} must be a dense tensor, got a {kind} tensor; for a nested tensor x, "
                "pass x.values(), and x.offsets() as cu_seqlens; for a sparse tensor x, pass "
                "x.to_dense()"
            )
        if not 2 <= x.ndim <= 4:
            raise ShapeError(
                f"{name} must be {'(batch, heads, ' + last_axes(name)[1:]}, leading axes "
                f"optional, got {tuple(x.shape)}"
            )
    first, *others = tensors.values()
    if any(x.device != first.device for x in others):
        found = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
        raise DTypeError(f"{', '.join(tensors)} must be on one device, got {found}")
    return [autocast(x) for x in tensors.values()]


def check_sinks(sinks: Any, q: Tensor) -> None:
    """Raise an error unless the sinks are one float per query head, (heads,), on q's device."""
    if not isinstance(sinks, Tensor):
        raise DTypeError(f"sinks must be a torch.Tensor, got {shown(sinks)}")
    if sinks.device != q.device:
        raise DTypeError(f"sinks must be on q's device {q.device}, got {sinks.device}")
    heads = q.shape[-3] if q.ndim > 2 else 1
    if tuple(sinks.shape) != (heads,) or not sinks.is_floating_point():
        raise ShapeError(
            f"sinks must be one number per query head, of shape ({heads},), got "
            f"{name_of(sinks.dtype)} of shape {tuple(sinks.shape)}"
        )


def autocast(x: Tensor) -> Tensor:
    """Return `x`, cast to autocast's type if autocast is on and `x` is float32 or narrower."""
    kind = x.device.type
    # Not amp.is_autocast_available: torch 2.11's Dynamo cannot trace it.
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return x
    wide = x.dtype == torch.float64 or not x.is_floating_point()
    return x if wide else x.to(torch.get_autocast_dtype(kind))


def default_backend(x: Tensor) -> str:
    """Return the name of the default engine for a tensor's device."""
    return "cupy" if x.is_cuda else "numba"


def _expand(x: Tensor) -> Tensor:
    """Return a 4-D view with leading axes of length 1, or the tensor itself if it is 4-D.

    If the same tensor is passed as q, k and v, views would change the order in which torch adds the
    three gradients.
    """
    return x if x.ndim == 4 else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))


def _offsets(name: str, cu_seqlens: Any) -> Tensor | None:
    if cu_seqlens is None or isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    if not torch.compiler.is_compiling():
        whole = isinstance(cu_seqlens, Sequence) or hasattr(cu_seqlens, "__array__")
        if not whole or not all(checks.is_int(x) and abs(x) < 2**63 for x in cu_seqlens):
            raise ShapeError(f"{name} must be a list of integer offsets, got {shown(cu_seqlens)}")
    return torch.tensor(cu_seqlens, dtype=torch.int64, device="cpu")


def _without_heads(*qkv: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v; raise `ShapeError` unless they are `FlashAttention`'s (batch, n, d)."""
    if any(x.ndim != 3 for x in qkv):
        raise ShapeError(
            "FlashAttention.apply takes q, k and v of shape (batch, n, d), got "
            f"{', '.join(str(tuple(x.shape)) for x in qkv)}; for arrays with heads, use "
            "flashsim.torch.attention"
        )
    return qkv


class FlashAttention(torch.autograd.Function):
    """FlashAttention-2 as an autograd function: ``FlashAttention.apply(q, k, v, is_causal)``.

    q is (batch, n_q, d); k and v are (batch, n_k, d). For the backward pass, q, k, v, the output
    and L of shape (batch, n_q) are saved. Stanford CS336's assignment 2 asks for this interface.
    """

    jvp = staticmethod(ops.no_forward_mode)

    @classmethod
    def apply(cls, *given: Any) -> Any:
        """Return the output, (batch, n_q, d).

        Under torch.func, `attention` computes it, because torch.func refuses autograd functions
        that save more than their inputs and results.
        """
        # torch.compile cannot trace `super().apply`.
        if not (torch.compiler.is_compiling() or ops.transformed()):
            return super().apply(*given)
        q, k, v, *causal = given
        q, k, v = taken(q=q, k=k, v=v)
        heads = [x.unsqueeze(1) for x in _without_heads(q, k, v)]
        return attention(*heads, causal=causal[0] if causal else False).squeeze(1)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Run the forward pass, and return the output, (batch, n_q, d)."""
        q, k, v = taken(q=q, k=k, v=v)
        heads = (x.unsqueeze(1) for x in _without_heads(q, k, v))
        out, lse = attention(*heads, causal=is_causal, return_lse=True)
        out, lse = out.squeeze(1), lse.squeeze(1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward pass, and return the gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        by = default_backend(q)
        question = Options(ctx.is_causal, -1, -1, 0.0, None, "flash2", None, by)
        dout, out, lse, *qkv = (x.unsqueeze(1) for x in (*dout, out, lse, q, k, v))
        found = ops.gradients(ops.OpCall.of(question), dout, out, lse, None, *qkv)
        return (*(x.squeeze(1) for x in found), None)
