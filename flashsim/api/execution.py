"""`run` computes attention; `backward` computes its gradients from the inputs, `out` and `lse`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flashsim.api import array_libraries, dispatch, repeats
from flashsim.api.arrays import check_kept, expand, squeeze, warn_of_overflow
from flashsim.api.decode_options import DecodeOptions, with_fields
from flashsim.api.inputs import Request
from flashsim.api.request import ask
from flashsim.api.result import Gradients, Result, made, recorded
from flashsim.errors import own_errors
from flashsim.functions.mask import MaskFunction
from flashsim.functions.tracing import Traced
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
    mask_mod: Callable[..., Any] | MaskFunction | None = None,
    score_mod: Callable[..., Any] | Traced | None = None,
    sinks: Any = None,
    cu_seqlens_q: Sequence[int] | None = None,
    cu_seqlens_k: Sequence[int] | None = None,
    tiling: Tiling | None = None,
    device: str | Device = "H100",
    backend: str = "simulator",
    key_order: str = "ascending",
    nan_policy: str = "propagate",
    trace: bool | str = False,
    decode: DecodeOptions | None = None,
    **options: Any,
) -> Result:
    """Compute attention tile by tile, on the simulator, the CPU or a GPU.

    The result is ``softmax(mask(score_mod(softcap(scale q k^T) + bias))) v``. If there is no batch
    entry, query or key, out and gradients are zeros and the LSE is -inf (with `sinks`, the sinks);
    no trace is recorded.

    Parameters
    ----------
    q : array, (batch, heads, n_q, head_dim); leading axes may be left out
    k, v : array, (batch, kv_heads, n_kv, head_dim) and (batch, kv_heads, n_kv, head_dim_v)
        `heads` must be a multiple of `kv_heads`. v may be None: then V is the first `head_dim_v`
        (an option) columns of k. The type is float64, float32, float16 or bfloat16; GPUs do not
        take float64. "simulator" also takes float8_e4m3fn and float8_e5m2; "cupy" takes them too,
        for forward passes on Hopper. Then out is bfloat16. On the CPU, arrays may come from NumPy,
        torch or any library with DLPack, such as JAX. Results come from the same library as the
        inputs. Inputs are not copied.
    algorithm : str
        "flash2", "flash2-fused", "flash2-fused-first", "flash2-once", "flash1", "standard" or
        "flash-decode".
        "flash1" and "standard" follow the first papers. The four "flash2" algorithms differ only
        in the backward pass. "flash2" runs three passes without atomics. "flash2-fused" is
        Algorithm 2 of the FlashAttention-2 paper: one KV-outer pass that adds to dQ by atomics.
        In "flash2-fused-first", the first visit of a row tile stores its part of dQ instead, so
        that no pass writes zeros. "flash2-once" needs exactly one key tile per row tile.
        "flash-decode" also splits the keys, for few queries and a long KV cache; it has no backward
        pass.
    causal, window, softcap, scale, mask, cu_seqlens_q, cu_seqlens_k
        See `Problem`.
    bias : array, (1 or batch, 1 or heads, n_q, n_kv), optional
        Added to the scores, in q's dtype; leading axes may be left out. -inf masks a score. So
        does a number near the lowest finite number of the type in which scores are computed.
    block_mask : BlockMask, or a boolean grid with one value per tile (then pass `tiling`), optional
    mask_mod, score_mod : callable, optional
        ``mask_mod(b, h, q, k)`` returns whether a score is kept, and ``score_mod(score, b, h, q,
        k)`` the score to use, as in PyTorch's FlexAttention. They are traced once: plain Python
        with operators, ``& | ~``, `where`, `abs`, `exp`, `tanh` and alike of NumPy, torch or JAX,
        and arrays that they capture, indexed by expressions. `Result.backward` computes gradients
        of captured arrays. See `flashsim.functions` for ready-made ones.
    sinks : array, (heads,), optional
        A learnable score per query head without a value, which joins each row's softmax. The LSE
        includes it.
    tiling : Tiling, optional
        Default: that of `Tiling.fit`: it fits `device` and, without a mask, moves the fewest bytes.
    device : str or Device
        The simulated machine; ``flashsim study devices`` lists the names.
    backend : str
        "simulator" (older name: "numpy") runs the simulated machine. "numba" is the fast CPU
        engine: it runs the same tiles with the same trace, for FlashAttention-2 only. Its first
        call compiles the code and keeps it on disk. "cupy" runs CUDA C++ kernels on the NVIDIA GPU
        that holds the arrays; "numba_cuda" runs kernels written in Python. Both copy NumPy arrays
        to the GPU and back. Results come from the inputs' library: NumPy, CuPy or torch. For GPU
        arrays of another library (read by ``__cuda_array_interface__`` or ``__dlpack__``), results
        are CuPy arrays, which that library can take back through DLPack.
    key_order : {"ascending", "descending"}
        The order of the key tiles.
    nan_policy : {"propagate", "raise"}
        What to do about NaN and infinity in the inputs.
    trace : bool or "timeline"
        Record every transfer. "timeline" also records where and when it happened on a GPU. The
        "teaching" kernels of "numba_cuda" record no timeline, so that backend has no timeline in
        float32.
    decode : DecodeOptions, optional
        The options of "flash-decode" in one object, for "simulator" and "cupy".
    **options
        Options of the backend and the algorithm:

        - FP8 inputs, "simulator" and "cupy": `scales` is required. It is three float32 arrays that
          q, k and v are multiplied by, or "unscaled". The shape of each array is () (or it is a
          number) for a whole tensor, (batch, heads), or (batch, heads, blocks). `scale_block` is
          (query rows, key rows) per block; default: those of a tile. "cupy" also takes
          `v_transposed`: V in the layout that its kernel reads. See `flashsim.quantize`.
        - "flash-decode", "simulator" and "cupy": each field of `DecodeOptions` by its name, in
          place of `decode`: `splits`, `pack_gqa`, `cache_seqlens`, `block_table`, `shared_prefix`,
          `head_dim_v` (with v=None) and, for "cupy", `workspace`.
        - The "flash2" algorithms, "simulator" and "cupy": with `pack_gqa`, the query heads of a KV
          head share row tiles in the forward pass. Row r is then query r // group of head
          r % group. "simulator" packs heads only with True. "cupy" decides itself, unless it is
          True (only Hopper's kernels) or False; `Result.split` says what ran.
        - "simulator": `precision`, a `flashsim.Precision`, sets the type at every rounding point.
          It cannot be combined with a trace, since it changes no size.
        - "numba": `threads` is the number of threads; default: every CPU that this process may use.
          `micro_kernel` is "amx", "avx512_bf16" (both for bfloat16), "vector" or "plain"; default:
          the first that this CPU can run and that pays off. The result's `kernel` names it.
        - "cupy": `kernel` is "hopper" or "portable"; default: "hopper" if its kernels support the
          problem. `allow_tf32` (default: False) runs float32 products on tensor cores. Then every
          operand is rounded to tf32, which changes it by at most 2**-11 of its value.
        - "numba_cuda": `kernel` is "hopper" (backward up to a head_dim of 128, "tensor" above),
          "tensor" (both: float16 and bfloat16) or "teaching" (float16 and float32); default: the
          first that supports the problem.

    Returns
    -------
    Result
        With `out`, `lse`, `trace` and a `backward(dout)` method.

    Raises
    ------
    FlashSimError
        Every error is also a built-in error, such as ValueError or TypeError. Its message says what
        was wrong, what was passed, and what is possible.
    """
    if decode is not None:
        options = with_fields(options, decode, [algorithm])
    again = key = None
    # Values of arrays, and results of functions, may change between calls.
    if (
        mask is block_mask is mask_mod is score_mod is bias is sinks is None
        and cu_seqlens_q is cu_seqlens_k is None
        and nan_policy == "propagate"
        and not options
    ):
        plain = causal, window, softcap, scale, algorithm, tiling, device, backend, key_order, trace
        again, key = repeats.known(plain, q, k, v)
        if again is not None and (repeated := again(q, k, v)) is not None:
            return repeated
    request = Request(
        *(causal, window, softcap, scale, mask, block_mask, cu_seqlens_q, cu_seqlens_k),
        *(algorithm, tiling, device, backend, key_order, nan_policy, trace),
        *(mask_mod, score_mod, sinks),
        tuple(options.items()),
    )
    asked, job = ask(request, q, k, v, bias)
    give = asked.host.give
    outcome = asked.engine.forward(job)
    if asked.backend in dispatch.ON_CPU and (unseen := outcome.unseen("out")):
        warn_of_overflow(unseen, job.inputs)
    ndim = asked.ndim
    result = made(
        Result,
        out=give(squeeze(outcome.arrays["out"], ndim)),
        lse=give(squeeze(outcome.arrays["lse"], ndim - 1)),
        _trace=recorded(job, outcome, "forward", asked.backend),
        kernel=outcome.kernel,
        tiling=outcome.tiling,
        split=outcome.split,
        _job=job,
        _saved=outcome.saved,
        _asked=asked,
    )
    if again is None and key is not None:
        repeats.note(key, result)
    return result


@own_errors
def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    *,
    dlse: Any = None,
    deterministic: bool | None = None,
    captured: bool | Sequence[str] | None = None,
    **question: Any,
) -> Gradients:
    """Compute gradients of attention from q, k, v, `out`, `lse` and `dout`; P is recomputed.

    Parameters
    ----------
    q, k, v : array
        The arrays that were passed to `run`.
    out, lse, dout : array
        out and lse as `run` returned them; dout is the gradient of the loss with respect to `out`.
    dlse : array, optional
        The gradient with respect to `lse`, as in `Result.backward`.
    deterministic : bool, optional
    captured : bool or sequence of str, optional
        As in `Result.backward`.
    **question
        The keywords of `run`. `tiling` and `trace` apply to the backward pass. The algorithm must
        recompute the probabilities; "standard", which saves them, is refused.

    Returns
    -------
    Gradients

    Raises
    ------
    FlashSimError
    """
    bias = question.pop("bias", None)
    algorithm = question.get("algorithm", "flash2")
    question = {**with_fields(question, question.pop("decode", None), [algorithm])}
    keywords = {name: question.pop(name) for name in Request._fields[:-1] if name in question}
    request = Request(**keywords)._replace(options=tuple(question.items()))
    asked, job = ask(request, q, k, v, bias)
    p = job.problem
    rows = tuple(job.q.shape[4 - asked.ndim : 3])
    out, lse = array_libraries.take(asked.host, out=out, lse=lse)
    check_kept("out", out, (*rows, p.head_dim_v), p.result_dtype)
    check_kept("lse", lse, rows, p.compute_dtype)
    saved = asked.engine.recall(job, expand(out), expand(lse, 3))
    result = made(Result, out=out, lse=lse, _job=job, _saved=saved, _asked=asked)
    how = {"dlse": dlse, "deterministic": deterministic, "captured": captured}
    # Without the method's own guard, errors about a type name this function.
    gradients: Any = Result.backward.__wrapped__  # type: ignore[attr-defined]
    return gradients(result, dout, tiling=request.tiling, **how)


__all__ = ["Gradients", "Result", "backward", "run"]
