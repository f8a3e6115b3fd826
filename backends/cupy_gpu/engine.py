"""`backend="cupy"`: FlashAttention-2 on a real NVIDIA GPU, in CUDA C++ compiled by NVRTC."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from flashsim.backends import failures
from flashsim.backends.launch import device_tables
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy import family as families
from flashsim.backends.launch_policy.decode_plan import ALGORITHM as DECODE
from flashsim.backends.launch_policy.decode_plan import OPTIONS as DECODING
from flashsim.backends.launch_policy.family import Family
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.backends.launch_policy.hopper_fp8 import HOPPER_FP8
from flashsim.backends.launch_policy.portable import PORTABLE, TF32
from flashsim.engines.protocol import Job, Outcome, Repeat
from flashsim.errors import OptionError, UnsupportedError
from flashsim.problem import checks
from flashsim.problem.problem import Problem

#: Options of FP8 inputs: the scales, and V as `quantize` transposes it.
_FP8 = ("scales", "scale_block", "v_transposed")
OPTIONS: frozenset[str] = frozenset({"kernel", "allow_tf32", *DECODING, *_FP8})
#: Kernel families by the names of the option `kernel`.
KERNELS: dict[str, Family] = {"portable": PORTABLE, "hopper": HOPPER}
ALGORITHMS = ("flash2", "flash2-fused", "flash2-fused-first", "flash2-once")
#: A function that selects a family for a job without arrays: ``(job, gpu, direction)``.
FamilyOf = Callable[[Job, Gpu, str], Family]

failures.require_cupy("cupy")

import cupy  # noqa: E402

from flashsim.backends.cupy_gpu import (  # noqa: E402
    arrays,
    bias,
    captured,
    decode,
    decode_options,
    fp8,
)
from flashsim.backends.cupy_gpu.calls import NO_GRADIENTS, NO_SCRATCH, Call, Plan  # noqa: E402
from flashsim.backends.cupy_gpu.device import gpu_of, require_gpu  # noqa: E402
from flashsim.backends.cupy_gpu.direct import (  # noqa: E402
    CupyForward,
    Direct,
    Forward,
    Placed,
    RepeatedBackward,
)
from flashsim.backends.cupy_gpu.launching import aside  # noqa: E402


def forward(job: Job) -> Outcome:
    """Run the forward pass on the arrays' GPU, or on the current GPU for NumPy arrays."""
    if job.algorithm == DECODE:
        require_gpu()
        space = arrays.space_of({"q": job.q, "k": job.k, "v": job.v}, job.problem.dtype)
        return decode.forward(job, gpu_of(space.device), space)
    job = bias.as_function(job)
    if not job.memo:
        _check(job)
    return forward_with(_family, job)


def recall(job: Job, out: Any, lse: Any) -> Mapping[str, Any]:
    """Rebuild the state that the backward pass needs from a forward pass's `out` and `lse`."""
    job = bias.as_function(job)
    _check(job)
    _no_fp8_gradients(job)
    return recall_of(job, out, lse)


def backward(job: Job, saved: Mapping[str, Any], dout: Any, dlse: Any = None) -> Outcome:
    """Run the backward pass in three passes, or in a fused pass that accumulates dQ in HBM."""
    if job.algorithm == DECODE:
        raise UnsupportedError(f"algorithm={DECODE!r} has no backward pass; use algorithm='flash2'")
    job = bias.as_function(job, gradient=True)
    if not job.memo:
        _no_fp8_gradients(job)
    return backward_with(_family, job, saved, dout, dlse)


def constant(job: Job, shape: tuple[int, ...], dtype: str, value: float) -> Any:
    """Return an array filled with `value`, in the library and on the device of the job's arrays."""
    require_gpu()
    decode_options.check(job) if job.algorithm == DECODE else _check(job)
    return constant_of(job, shape, dtype, value)


def constant_of(job: Job, shape: tuple[int, ...], dtype: str, value: float) -> Any:
    """Return an array filled with `value` for a job that was already checked (see `constant`)."""
    require_gpu()
    given = {"q": job.q, "k": job.k, "v": job.v}
    space = arrays.space_of(given, job.problem.result_dtype)
    with space.on_device():
        return space.full(shape, dtype, value)


def direct(job: Job, backward_job: Callable[[Mapping[str, Any], bool], Job]) -> Direct | None:
    """Return a checked job's forward and backward pass as functions of torch tensors, or None.

    The returned functions do not check their arguments. The result is None if the arrays are not
    torch tensors, or if launches need more than addresses and strides. ``backward_job(recalled,
    with_lse)`` returns the backward pass's job. `recalled` is the result of `recall`, and
    `with_lse` says whether the LSE has a gradient.
    """
    p = job.problem
    if job.algorithm == DECODE or job.trace or p.fp8:
        return None
    require_gpu()
    space = arrays.space_of({"q": job.q, "k": job.k, "v": job.v}, p.dtype)
    if not isinstance(space, arrays.TorchSpace):
        return None
    _check(job)

    def backward_plan(with_lse: bool) -> Plan:
        return _plan(_family, backward_job({"space": space}, with_lse), "backward", space)

    with _EXPLAINING:
        plan = _plan(_family, job, "forward", space)
    return Direct(space, (p.head_dim, p.head_dim_v), plan, backward_plan)


def repeat(job: Job) -> Repeat | None:
    """Return a function that repeats a job's forward pass on other device arrays, or None."""
    p = job.problem
    if job.algorithm == DECODE:
        return None
    space = arrays.space_of({"q": job.q, "k": job.k, "v": job.v}, p.result_dtype)
    plan = _plan(_family, job, "forward", space)
    repeated = _repeated(job, plan, space)
    unpadded = plan.sizes.out.width == p.head_dim_v
    return repeated.repeat if repeated is not None and unpadded else None


def placed(job: Job, *, few: bool) -> Placed | None:
    """Return a checked job's forward pass as a function of array addresses, or None.

    With `few` queries, the returned function runs the decode kernels. The arrays at the addresses
    must be contiguous. The result is None if the kernels cannot read contiguous arrays in place,
    for example because a head_dim is not a multiple of 8.
    """
    p = job.problem
    require_gpu()
    if p.fp8 or p.head_dim % 8 or p.head_dim_v % 8:
        return None
    given = {"q": job.q, "k": job.k, "v": job.v}
    space, shapes = arrays.space_of(given, p.dtype), tuple(x.shape for x in given.values())
    if few:
        return Placed(space, shapes, decode.Decoder(space, p, gpu_of(space.device), 0, None))
    _check(job)
    with _EXPLAINING:
        return Placed(space, shapes, _plan(_family, job, "forward", space))


def decoder(
    problem: Problem, like: Any, page: int = 0, splits: int | None = None
) -> decode.Decoder:
    """Return a `Decoder` for torch tensors on `like`'s device, or raise `UnsupportedError`."""
    require_gpu()
    space = arrays.space_of({"q": like}, problem.dtype)
    return decode.Decoder(space, problem, gpu_of(space.device), page, splits)


def adopt(name: str, array: Any) -> Any:
    """Return a CuPy array that shares the memory of an array which supports only DLPack."""
    require_gpu()
    return arrays.adopt(name, array)


def fastest_backward(
    job: Job, saved: Mapping[str, Any], algorithm: str, deterministic: bool
) -> tuple[str, bool]:
    """Return the fastest backward algorithm, and whether it adds to dQ in a fixed order."""
    return fastest_of(_family, job, saved, algorithm, deterministic)


def fastest_of(
    family_of: FamilyOf, job: Job, saved: Mapping[str, Any], algorithm: str, deterministic: bool
) -> tuple[str, bool]:
    """Return the result of `fastest_backward` for the families that `family_of` selects."""
    job, gpu = bias.as_function(job), gpu_of(saved["space"].device)
    return families.fastest_backward(
        job.problem,
        gpu,
        lambda form: family_of(replace(job, algorithm=form), gpu, "backward"),
        algorithm,
        deterministic,
        tiled=job.tiling is not None,
    )


def forward_with(family_of: FamilyOf, job: Job) -> Outcome:
    """Run the forward pass with the kernel family that the function `family_of` picks."""
    p = job.problem
    require_gpu()
    space = arrays.space_of({"q": job.q, "k": job.k, "v": job.v}, p.result_dtype)
    with _EXPLAINING:
        plan = _plan(family_of, job, "forward", space)
        repeated = _repeated(job, plan, space)
        with space.on_device():
            key = None
            if repeated is not None:
                out, lse, key = repeated.again(job.q, job.k, job.v)
                if key is None:
                    kept = {"space": space, "arrays": (job.q, job.k, job.v, out, lse)}
                    return _outcome(space, plan, p, out, lse, kept)
            q, k, v = space.view(job.q), space.view(job.k), space.view(job.v)
            like, scales, sizes = q.array, (), plan.sizes
            if p.fp8:
                v = fp8.transposed(space, job, v)
                like = space.prototype(p.result_dtype)
                scales = tuple(fp8.scales(space, job).values())
            if key is None:
                out, lse = space.empty(sizes.out.shape, like), space.empty(sizes.lse)
            saved = _saved(space, q, k, v, arrays.View(sizes.out.at(space.pointer(out)), out), lse)
            head = *saved["places"], *NO_GRADIENTS, saved["lse"], *NO_SCRATCH
            if scales:
                head = *head[: -len(scales)], *map(space.pointer, scales)
            given = captured.captured(job, space)
            call = Call(space, head, given)
            stages, spans = plan.run(call, job.trace)
            if repeated is not None and key is not None and "copied" not in saved:
                repeated.note(key, call)
            return _outcome(space, plan, p, out, lse, saved, stages, spans)


def _outcome(
    space: arrays.Space,
    plan: Plan,
    p: Problem,
    out: Any,
    lse: Any,
    saved: Mapping[str, Any],
    stages: Any = None,
    spans: Any = None,
) -> Outcome:
    """Return the `Outcome` of a forward pass, with the padding of `out` removed."""
    out = space.result(out, p.head_dim_v, plan.sizes.out.width)
    results = {"out": out, "lse": space.result(lse)}
    ran = plan.tiling, stages, plan.name, saved, spans, plan.gpu.name
    return Outcome(results, *ran, split=plan.split)


def _repeated(job: Job, plan: Plan, space: arrays.Space) -> Forward | None:
    """Return an object that repeats forward launches, or None for other jobs.

    The job may have no functions and sinks. Its arrays are CuPy arrays or torch tensors.
    """
    p = job.problem
    kind: type[Forward] | None = None
    if isinstance(space, arrays.TorchSpace):
        kind = Forward
    elif type(job.q) is type(job.k) is type(job.v) is cupy.ndarray:
        kind = CupyForward
    if kind is None or job.trace or p.fp8:
        return None
    found = job.memo.get((Forward, plan), job)
    if found is job:  # not in the memo
        kernels = [one.one.kernel for one in plan.launches]
        plain = all(x.functions is None and not x.sinks for x in kernels)
        found = job.memo[Forward, plan] = kind(space, plan) if plain else None
    return found


def recall_of(job: Job, out: Any, lse: Any) -> Mapping[str, Any]:
    """Rebuild the state that `backward_with` needs from a forward pass's `out` and `lse`."""
    p = job.problem
    require_gpu()
    given = {"q": job.q, "k": job.k, "v": job.v, "out": out}
    space = arrays.space_of(given, p.dtype)
    arrays.check_space("lse", lse, p.dtype, space)
    with _EXPLAINING, space.on_device():
        q, k, v, kept = (space.view(x) for x in given.values())
        return _saved(space, q, k, v, kept, space.vector(lse))


def _saved(
    space: arrays.Space,
    q: arrays.View,
    k: arrays.View,
    v: arrays.View,
    out: arrays.View,
    lse: Any,
) -> dict[str, Any]:
    saved = {
        "space": space,
        "arrays": (q.array, k.array, v.array, out.array, lse),  # keeps the arrays alive
        "places": (*q.place, *k.place, *v.place, *out.place),
        "lse": space.pointer(lse),
    }
    if q.copied or k.copied or v.copied or out.copied:
        views = {"q": q, "k": k, "v": v, "out": out}
        saved["copied"] = {name: view.copied for name, view in views.items() if view.copied}
    return saved


def backward_with(
    family_of: FamilyOf, job: Job, saved: Mapping[str, Any], dout: Any, dlse: Any = None
) -> Outcome:
    """Run the backward pass with the kernel family that the function `family_of` picks."""
    p, space = job.problem, saved["space"]
    arrays.check_space("dout", dout, p.dtype, space)
    if dlse is not None:
        arrays.check_space("dlse", dlse, p.dtype, space)
    with _EXPLAINING:
        plan = _plan(family_of, job, "backward", space)
        repeated = _repeated_backward(job, plan, space)
        with space.on_device():
            if repeated is not None:
                q, k, v, out, lse = saved["arrays"]
                made = zip(_GRADIENTS, repeated(q, k, v, out, lse, dout, dlse), strict=True)
                return Outcome(dict(made), plan.tiling, None, plan.name, gpu=plan.gpu.name)
            like, sizes = saved["arrays"][0], plan.sizes
            given = space.view(dout)
            less = None if dlse is None else space.vector(dlse)
            if "places" not in saved:  # of repeated launches
                q, k, v, out, lse = saved["arrays"]
                in_torch = isinstance(space, arrays.TorchSpace)
                view = (lambda x: arrays.View(*arrays.place(space, x))) if in_torch else space.view
                views = [view(x) for x in (q, k, v, out)]
                saved = _saved(space, views[0], views[1], views[2], views[3], lse)
            places = *saved["places"], *given.place
            less_at = 0 if less is None else space.pointer(less)
            call, dq, dk, dv = plan.gradients(space, places, saved["lse"], less_at, like)
            call.captured = functions = captured.captured(job, space)
            stages, spans = plan.run(call, job.trace)
            gradients = {
                "dq": space.result(dq, p.head_dim, sizes.dq.width),
                "dk": space.result(dk, p.head_dim, sizes.dk.width),
                "dv": space.result(dv, p.head_dim_v, sizes.dv.width),
            }
            if p.score_grads or p.sinks:
                with space.active():
                    delta = call.head[-6]  # the address of delta; see `Plan.gradients`
                    more = captured.gradients(job, functions, space, saved["lse"], delta)
                gradients |= bias.renamed(more)
            return Outcome(
                gradients, plan.tiling, stages, plan.name, timeline=spans, gpu=plan.gpu.name
            )


_EXPLAINING = failures.Explaining()
_GRADIENTS = ("dq", "dk", "dv")


def _repeated_backward(job: Job, plan: Plan, space: arrays.Space) -> RepeatedBackward | None:
    """Return an object that repeats a backward pass of torch tensors, or None for other jobs."""
    p = job.problem
    if job.trace or not isinstance(space, arrays.TorchSpace):
        return None
    found = job.memo.get((RepeatedBackward, plan), job)
    if found is job:  # not in the memo
        plain = p.bias is None and not (p.has_functions or p.score_grads or p.sinks)
        made = RepeatedBackward(space, (p.head_dim, p.head_dim_v), plan) if plain else None
        found = job.memo[RepeatedBackward, plan] = made
    return found


def _plan(family_of: FamilyOf, job: Job, direction: str, space: arrays.Space) -> Plan:
    """Return the plan of a job's launches, cached because it does not depend on the arrays."""
    plan = job.memo.get((family_of, direction, space))
    if plan is None:
        # A backward pass packs no heads.
        unread = _FP8 if direction == "forward" else (*_FP8, "pack_gqa")
        plan = job.memo[family_of, direction, space] = _planned(
            *(family_of, direction, job.problem, job.tiling, job.key_order, job.algorithm),
            *(job.deterministic, job.trace),
            tuple((name, x) for name, x in job.options.items() if name not in unread),
            space,
        )
    return plan


@lru_cache(maxsize=512)
def _planned(
    family_of: FamilyOf,
    direction: str,
    problem: Problem,
    tiling: Any,
    key_order: Any,
    algorithm: str,
    ordered: bool,
    trace: bool | str,
    options: tuple[tuple[str, Any], ...],
    space: arrays.Space,
) -> Plan:
    job = Job(problem, None, None, None, options=dict(options))
    job = replace(job, tiling=tiling, key_order=key_order, algorithm=algorithm, trace=trace)
    with space.active(), aside():
        gpu = gpu_of(space.device)
        family = family_of(job, gpu, direction)
        given = (problem, tiling, gpu, key_order, _report(job))
        if direction == "forward":
            passes = family.forward_passes(*given, job.options.get("pack_gqa"))
        else:
            passes = family.backward_passes(*given, algorithm, ordered)
        how: dict[str, Any] = {}
        if direction == "backward":
            how = {"algorithm": algorithm, "ordered": ordered and algorithm == "flash2-fused"}
        return Plan(family.name, passes, gpu, space.device, family.load, **how)


def _check(job: Job) -> None:
    p = job.problem
    for option in DECODING:
        if option in job.options and option != "pack_gqa":
            raise OptionError(
                f"the option {option}= works only with algorithm={DECODE!r}, got "
                f"algorithm={job.algorithm!r}; leave out {option}="
            )
    launch.check_asked("cupy", job, ALGORITHMS, KERNELS)
    if p.dtype == "float64":
        raise UnsupportedError(
            "backend='cupy' supports float16, bfloat16 and float32, not float64; convert the "
            "arrays, or use backend='simulator'"
        )
    launch.check_head_dims(p, "backend='cupy'")
    device_tables.refuse(p)
    tf32 = job.options.get("allow_tf32", False)
    if not isinstance(tf32, bool):
        raise OptionError(f"allow_tf32 must be True or False, got {tf32!r}")
    checks.flag("pack_gqa", job.options.get("pack_gqa", False))


def _no_fp8_gradients(job: Job) -> None:
    if job.problem.fp8:
        raise UnsupportedError(
            "FP8 inputs have no backward pass on a GPU; use backend='simulator', or convert q, k "
            "and v to bfloat16"
        )


def _family(job: Job, gpu: Gpu, direction: str) -> Family:
    """Return the kernel family that the job names; "auto" prefers Hopper's family."""
    name = job.options.get("kernel", "auto")
    if job.problem.fp8:
        if name == "portable":
            raise UnsupportedError("the portable kernels do not support FP8; use kernel='hopper'")
        return HOPPER_FP8
    given = (job.problem, job.tiling, gpu, direction, job.algorithm)
    if name == "hopper" or (name == "auto" and not HOPPER.refusal(*given)):
        return HOPPER
    # TF32 is allowed, not requested: where its larger tiles do not fit, products stay float32.
    allowed = job.problem.dtype == "float32" and job.options.get("allow_tf32", False)
    return TF32 if allowed and not TF32.refusal(*given) else PORTABLE


def _report(job: Job) -> str:
    return "timeline" if job.trace == "timeline" else "counts" if job.trace else ""
