"""The public function `run`, and `backward` for a forward pass of which little was kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from flashsim.api import dispatch, hosts
from flashsim.api.arrays import check_kept, expand, squeeze, warn_of_overflow
from flashsim.api.asked import ask, keep, key_of, recall
from flashsim.api.result import Gradients, Result, gradients, made, recorded
from flashsim.errors import own_errors
from flashsim.problem.hardware import Device
from flashsim.schedule.tiling import Tiling


@own_errors
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

    Computes ``softmax(mask(softcap(scale q k^T) + bias)) v``. If the batch, the queries or the keys
    are empty, out and gradients are zeros and the LSE is -inf; nothing is traced.

    Parameters
    ----------
    q : array, (batch, heads, n_q, head_dim); leading axes may be left out
    k, v : array, (batch, kv_heads, n_kv, head_dim) and (batch, kv_heads, n_kv, head_dim_v)
        `heads` must be a multiple of `kv_heads`; v may be None where an option `head_dim_v` says
        which of k's columns it is. float64, float32, float16 or bfloat16 (on a GPU not float64),
        "numpy" and, forward on Hopper, "cupy" also float8_e4m3fn or float8_e5m2, whose out is
        bfloat16. On the CPU, arrays of
        NumPy, torch, or any library that speaks DLPack (JAX); what goes in comes out, and is not
        copied on its way in.
    algorithm : {"flash2", "flash2-fused", "flash2-once", "flash1", "standard", "flash-decode"}
        "flash1" and "standard" hold what the first papers describe; "flash2-fused" and
        "flash2-once", which takes schedules with one visit of each row tile alone, differ from
        "flash2" in the backward pass only; "flash-decode" divides the keys as well, for few queries
        of a long cache, and has no backward pass.
    causal, window, softcap, scale, mask, cu_seqlens_q, cu_seqlens_k
        See `Problem`.
    bias : array, (1 or batch, 1 or heads, n_q, n_kv), optional
        Added to the scores, in q's dtype; leading axes may be left out. -inf masks a score, as
        does a number near the lowest of the type that scores are computed in.
    block_mask : BlockMask, or a boolean grid with one value a tile (then give `tiling`), optional
    tiling : Tiling, optional
        Default: the tiling that fits `device` and moves the fewest bytes.
    device : str or Device
        The machine that is simulated; see ``flashsim study devices`` for names.
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
        "numpy" and "cupy", for FP8 inputs, which must say what they stand for: `scales`, three
        float32 arrays that q, k and v are multiplied by, each () (or a number) for a whole tensor,
        (batch, heads) or (batch, heads, blocks), or "unscaled", if they stand for themselves; and
        `scale_block`, (query rows, key rows) of a block (default: a tile's); "cupy" also
        `v_transposed`, V as its kernel takes it; see `flashsim.quantize`. "numpy":
        `precision`, a `flashsim.Precision`, for every type that numbers are rounded to on the way
        (without a trace, since it changes no size).
        "numba": `threads`, how many (default: every CPU this process may use), and `micro_kernel`,
        "amx", "avx512_bf16" (both for bfloat16), "vector" or "plain" (default: the first of them
        that can run here and pays; the result's `kernel` says which ran). "cupy": `kernel`,
        "hopper" or "portable" (default: Hopper's wherever they run the problem), and `allow_tf32`:
        float32 products on tensor cores, every operand rounded to tf32, which is off by at most
        2**-11 of itself (default: False, float32 throughout). With ``algorithm="flash-decode"``, a
        few queries against a cache whose keys are split over blocks: `splits` ("auto" or how many),
        `pack_gqa` (True, what its kernels do), `cache_seqlens` (batch,), how many keys of each
        sequence are live, `block_table` (batch, pages of a sequence), int32, with k and v in pages,
        (pages, kv_heads, rows of a page, head_dim), and `workspace`
        (`flashsim.backends.cupy_gpu.decode.Workspace`). "numba_cuda":
        `kernel`, "hopper" (backward up to a head_dim of 128, "tensor" above), "tensor" (both:
        float16 and bfloat16) or "teaching" (float16 and float32); default: the first of them that
        runs the problem.

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
    key = key_of(q, k, v, rare, plain, options)
    asked = recall(key)
    if asked is None:
        asked = ask(
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
            names=_DEFAULTS,
        )
        keep(key, asked)
        job = asked.job
    else:
        job = asked.again(q, k, v)
    give = asked.host.give
    outcome = asked.engine.forward(job)
    if backend in dispatch.ON_CPU:
        warn_of_overflow(outcome.unseen("out"), job.arrays)
    ndim = asked.ndim
    return made(
        Result,
        out=give(squeeze(outcome.arrays["out"], ndim)),
        lse=give(squeeze(outcome.arrays["lse"], ndim - 1)),
        _trace=recorded(job, outcome, "forward", backend),
        kernel=outcome.kernel,
        tiling=outcome.tiling,
        _job=job,
        _saved=outcome.saved,
        _asked=asked,
    )


@own_errors
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
    key = key_of(q, k, v, _rare(keywords), _plain(keywords), question)
    asked = recall(key)
    if asked is None:
        asked = ask(q, k, v, question, **keywords, names=_DEFAULTS)
        keep(key, asked)
        job = asked.job
    else:
        job = asked.again(q, k, v)
    p = job.problem
    rows = tuple(job.q.shape[4 - asked.ndim : 3])
    out, lse = hosts.take(asked.host, out=out, lse=lse)
    check_kept("out", out, (*rows, p.head_dim_v), p.result_dtype)
    check_kept("lse", lse, rows, p.compute_dtype)
    saved = asked.engine.recall(job, expand(out), expand(lse, 3))
    return gradients(asked, job, out, saved, dout, keywords["tiling"], deterministic, None)


_DEFAULTS = run.__kwdefaults__ or {}
#: Keywords as `key_of` takes them, as in `run`.
_rare = itemgetter("bias", "mask", "block_mask", "cu_seqlens_q", "cu_seqlens_k", "nan_policy")
_plain = itemgetter(
    *("algorithm", "causal", "window", "softcap", "scale"),
    *("tiling", "device", "backend", "key_order", "trace"),
)

__all__ = ["Gradients", "Result", "backward", "run"]
