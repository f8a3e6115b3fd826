"""Run an already checked request's kernels directly on torch tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import cupy

from flashsim.backends.cupy_gpu import arrays
from flashsim.backends.cupy_gpu.calls import NO_GRADIENTS, NO_SCRATCH, Call, Plan, Repeated
from flashsim.backends.cupy_gpu.decode import Decoder
from flashsim.backends.failures import explain


class Placed:
    """A forward pass for fixed shapes of contiguous q, k and v, which are passed by address."""

    def __init__(
        self, space: arrays.Space, shapes: tuple[tuple[int, ...], ...], run: Plan | Decoder
    ) -> None:
        self._space, self._run = space, run
        _, heads, n, _ = shapes[0]
        width = shapes[2][3]
        self._strides = [(h * m * d, m * d, d) for _, h, m, d in shapes]
        self._out, self._keys = (heads * n * width, n * width, width), shapes[1][2]
        self._repeated = Repeated(() if isinstance(run, Decoder) else run.launches)

    def __call__(self, q: int, k: int, v: int, out: int, lse: int, stream: int) -> None:
        """Launch the forward pass on `stream`, for arrays at these addresses."""
        try:
            if cupy.cuda.runtime.getDevice() == self._space.device:
                self._launch(q, k, v, out, lse, stream)
                return
            with self._space.on_device():
                self._launch(q, k, v, out, lse, stream)
        except Exception as error:
            explain(error)
            raise

    def _launch(self, q: int, k: int, v: int, out: int, lse: int, stream: int) -> None:
        of_q, of_k, of_v = self._strides
        if isinstance(self._run, Decoder):
            self._run.at((q, *of_q), (k, *of_k), (v, *of_v), out, lse, self._keys, stream)
            return
        key = q, k, v, out, lse, stream
        if self._repeated.launch(key, stream):
            return
        head = q, *of_q, k, *of_k, v, *of_v, out, *self._out, *NO_GRADIENTS, lse, *NO_SCRATCH
        call = Call(self._space, head, stream=stream)
        self._run.run(call, False)
        self._repeated.note(key, call)


class Forward:
    """A forward pass on torch tensors of one device, which caches its launches and repeats them."""

    _space: arrays.Space

    def __init__(self, space: arrays.Space, plan: Plan) -> None:
        self._space, self._plan, sizes = space, plan, plan.sizes
        self._repeated, self._strides = Repeated(plan.launches), sizes.out.strides
        self._out, self._lse = space.maker(sizes.out.shape, plan.dtype), space.maker(sizes.lse)

    def again(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, tuple[Any, ...] | None]:
        """Return new arrays for out and the LSE, and None if a cached launch was repeated.

        If no launch is cached, the third result is the key for `note`, and the caller must launch
        the pass. The rows of the attention output are padded. The caller must make the space's
        device current.
        """
        space = self._space
        out, lse, stream = self._out(), self._lse(), space.stream()
        key = (
            *(stream, q.data_ptr(), q.stride(), k.data_ptr(), k.stride(), v.data_ptr()),
            *(v.stride(), out.data_ptr(), lse.data_ptr()),
        )
        return out, lse, None if self._repeated.launch(key, stream) else key

    def note(self, key: tuple[Any, ...], call: Call) -> None:
        """Record a call so that `again` can repeat it; it must use no copy of a tensor."""
        self._repeated.note(key, call)

    def __call__(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the attention output, whose rows are padded, and the LSE."""
        out, lse, key = self.again(q, k, v)
        if key is not None:
            placed = self._place(q), self._place(k), self._place(v)
            self._launch(key, (q, k, v), placed, out, lse)
        return out, lse

    def repeat(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, dict[str, Any]] | None:
        """Return out, the LSE and what a backward pass needs; None if the call must be checked.

        A call with tensors of several GPUs must be checked, and one that has to copy a tensor.
        """
        space = self._space
        if not q.get_device() == k.get_device() == v.get_device() == space.device:
            return None
        return self._repeat(q, k, v)

    def _repeat(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, dict[str, Any]] | None:
        """Do the work of `repeat` for arrays on the space's device."""
        space = self._space
        if cupy.cuda.runtime.getDevice() != space.device:
            return None
        try:
            out, lse, key = self.again(q, k, v)
            if key is not None:
                placed = self._place(q), self._place(k), self._place(v)
                if not (placed[0][1] is q and placed[1][1] is k and placed[2][1] is v):
                    return None
                self._launch(key, (q, k, v), placed, out, lse)
        except Exception as error:
            explain(error)
            raise
        return out, lse, {"space": space, "arrays": (q, k, v, out, lse)}

    def _place(self, x: Any) -> tuple[arrays.Place, Any]:
        """Return the address and strides of an array or of its copy, and the memory's owner."""
        return arrays.place(self._space, x)

    def _launch(
        self,
        key: tuple[Any, ...],
        given: tuple[Any, Any, Any],
        placed: tuple[tuple[arrays.Place, Any], ...],
        out: Any,
        lse: Any,
    ) -> None:
        """Launch the pass for tensors at these places, and record it unless one is a copy."""
        (at_q, of_q), (at_k, of_k), (at_v, of_v) = placed
        of_out, of_lse = self._space.pointer(out), self._space.pointer(lse)
        head = (
            *(*at_q, *at_k, *at_v, of_out, *self._strides, *NO_GRADIENTS),
            *(of_lse, *NO_SCRATCH),
        )
        call = Call(self._space, head, stream=key[0])
        self._plan.run(call, False)
        if of_q is given[0] and of_k is given[1] and of_v is given[2]:
            self.note(key, call)


class CupyForward(Forward):
    """The same for CuPy arrays."""

    def _place(self, x: Any) -> tuple[arrays.Place, Any]:
        return self._space.view(x)[:2]

    def again(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, tuple[Any, ...] | None]:
        """See `Forward.again`."""
        out, lse, stream = self._out(), self._lse(), self._space.stream()
        key = (
            *(stream, q.data.ptr, q.strides, k.data.ptr, k.strides, v.data.ptr, v.strides),
            *(out.data.ptr, lse.data.ptr),
        )
        return out, lse, None if self._repeated.launch(key, stream) else key

    def repeat(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, dict[str, Any]] | None:
        """See `Forward.repeat`."""
        devices = {x.data.device_id for x in (q, k, v)}
        return self._repeat(q, k, v) if devices == {self._space.device} else None


class RepeatedBackward:
    """A backward pass on torch tensors of one device, which caches its launches and repeats them.

    `dims` are head_dim and head_dim_v. The caller must make the space's device current.
    """

    def __init__(self, space: arrays.TorchSpace, dims: tuple[int, int], plan: Plan) -> None:
        self._space, self._dims, self._plan = space, dims, plan
        self._repeated, self._made = Repeated(plan.launches), _makers(space, plan)

    def __call__(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of q, k and v."""
        space, plan, again = self._space, self._plan, self._repeated
        new_dq, new_dk, new_dv, new_scratch, new_turns = self._made
        lse = lse.contiguous()
        less = None if dlse is None else dlse.contiguous()
        less_at, stream = 0 if less is None else less.data_ptr(), space.stream()
        dq, dk, dv = new_dq(), new_dk(), new_dv()
        scratch = None if new_scratch is None else new_scratch()
        turns = None if new_turns is None else new_turns()
        key = (
            *(stream, lse.data_ptr(), less_at),
            *(q.data_ptr(), q.stride(), k.data_ptr(), k.stride(), v.data_ptr(), v.stride()),
            *(out.data_ptr(), out.stride(), dout.data_ptr(), dout.stride()),
            *(dq.data_ptr(), dk.data_ptr(), dv.data_ptr()),
            scratch if scratch is None else scratch.data_ptr(),
            turns if turns is None else turns.data_ptr(),
        )
        if not again.launch(key, stream):
            given, made = (q, k, v, out, dout), (dq, dk, dv, scratch, turns)
            placed = [arrays.place(space, x) for x in given]
            places = tuple(n for place, _ in placed for n in place)
            head = plan.head(space, places, lse.data_ptr(), less_at, made)
            call = Call(space, head, stream=stream)
            plan.run(call, False)
            if all(x is y for (_, x), y in zip(placed, given, strict=True)):
                again.note(key, call)
        (d, d_v), sizes = self._dims, plan.sizes
        if sizes.dq.width == d and sizes.dv.width == d_v:
            return dq, dk, dv
        return (
            space.result(dq, d, sizes.dq.width),
            space.result(dk, d, sizes.dk.width),
            space.result(dv, d_v, sizes.dv.width),
        )


class Direct:
    """The forward and backward pass of a checked job, for torch tensors on one device.

    ``backward(with_lse)`` returns the plan of the backward pass; `with_lse` says whether the LSE
    has a gradient. `dims` are head_dim and head_dim_v.
    """

    def __init__(
        self,
        space: arrays.TorchSpace,
        dims: tuple[int, int],
        forward: Plan,
        backward: Callable[[bool], Plan],
    ) -> None:
        self._space, self._dims, self._forward = space, dims, Forward(space, forward)
        self._backward_plan, self._backwards = backward, dict[bool, RepeatedBackward]()
        self._width = forward.sizes.out.width

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the attention output and the LSE."""
        space = self._space
        try:
            if cupy.cuda.runtime.getDevice() == space.device:
                out, lse = self._forward(q, k, v)
            else:
                with space.on_device():
                    out, lse = self._forward(q, k, v)
            if self._width != self._dims[1]:
                out = space.result(out, self._dims[1], self._width)
            return out, lse
        except Exception as error:
            explain(error)
            raise

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of q, k and v."""
        try:
            if cupy.cuda.runtime.getDevice() == self._space.device:
                return self._gradients(q, k, v, out, lse, dout, dlse)
            with self._space.on_device():
                return self._gradients(q, k, v, out, lse, dout, dlse)
        except Exception as error:
            explain(error)
            raise

    def _gradients(self, *tensors: Any) -> tuple[Any, Any, Any]:
        with_lse = tensors[-1] is not None
        run = self._backwards.get(with_lse)
        if run is None:
            made = RepeatedBackward(self._space, self._dims, self._backward_plan(with_lse))
            run = self._backwards[with_lse] = made
        return run(*tensors)


def _makers(space: arrays.TorchSpace, plan: Plan) -> tuple[Any, ...]:
    """Return functions that allocate the five arrays of `Plan.new_arrays`, or None for no array."""
    sizes, dtype, summed = plan.sizes, plan.dtype, plan.summed
    return (
        *(space.maker(x.shape, dtype) for x in (sizes.dq, sizes.dk, sizes.dv)),
        None if summed is None else space.maker((summed + sizes.rows + plan.flags,)),
        partial(space.counters, (sizes.rows, 2)) if plan.ordered else None,
    )
