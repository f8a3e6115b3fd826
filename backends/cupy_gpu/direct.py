"""Run an already checked request's kernels directly on torch tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

from flashsim.backends.cupy_gpu import arrays
from flashsim.backends.cupy_gpu.calls import NO_GRADIENTS, NO_SCRATCH, Call, Plan, Repeated
from flashsim.backends.cupy_gpu.decode import Decoder
from flashsim.backends.failures import Explaining

_EXPLAINING = Explaining()


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
        of_q, of_k, of_v = self._strides
        space, again, key = self._space, self._repeated, (q, k, v, out, lse, stream)
        if isinstance(self._run, Decoder):
            self._run.at((q, *of_q), (k, *of_k), (v, *of_v), out, lse, self._keys, stream)
            return
        with _EXPLAINING, space.on_device():
            if again.launch(key, stream):
                return
            head = q, *of_q, k, *of_k, v, *of_v, out, *self._out, *NO_GRADIENTS, lse, *NO_SCRATCH
            call = Call(space, head, stream=stream)
            for one in self._run.launches:
                one(call, {})
            again.note(key, call)


class Forward:
    """A forward pass on torch tensors of one device, which caches its launches and repeats them."""

    def __init__(self, space: arrays.TorchSpace, plan: Plan) -> None:
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
            space = self._space
            given = arrays.place(space, q), arrays.place(space, k), arrays.place(space, v)
            (at_q, of_q), (at_k, of_k), (at_v, of_v) = given
            head = (
                *(*at_q, *at_k, *at_v, out.data_ptr(), *self._strides, *NO_GRADIENTS),
                *(lse.data_ptr(), *NO_SCRATCH),
            )
            call = Call(space, head, stream=key[0])
            for one in self._plan.launches:
                one(call, {})
            if of_q is q and of_k is k and of_v is v:
                self.note(key, call)
        return out, lse


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
        self._backward_plan, self._backwards = backward, dict[bool, tuple[Plan, Repeated, Any]]()
        self._width = forward.sizes.out.width

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the attention output and the LSE."""
        space = self._space
        with _EXPLAINING, space.on_device():
            out, lse = self._forward(q, k, v)
            if self._width != self._dims[1]:
                out = space.result(out, self._dims[1], self._width)
            return out, lse

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of q, k and v."""
        space, with_lse = self._space, dlse is not None
        with _EXPLAINING, space.on_device():
            known = self._backwards.get(with_lse)
            if known is None:
                plan = self._backward_plan(with_lse)
                repeated = Repeated(plan.launches)
                known = self._backwards[with_lse] = plan, repeated, _makers(space, plan)
            plan, again, makers = known
            lse = lse.contiguous()
            less = None if dlse is None else dlse.contiguous()
            less_at, stream = 0 if less is None else less.data_ptr(), space.stream()
            given = q, k, v, out, dout
            made = [make() for make in makers]
            key = (
                *(stream, lse.data_ptr(), less_at),
                *(q.data_ptr(), q.stride(), k.data_ptr(), k.stride(), v.data_ptr(), v.stride()),
                *(out.data_ptr(), out.stride(), dout.data_ptr(), dout.stride()),
                *[x if x is None else x.data_ptr() for x in made],
            )
            if not again.launch(key, stream):
                placed = [arrays.place(space, x) for x in given]
                places = tuple(n for place, _ in placed for n in place)
                head = plan.head(space, places, lse.data_ptr(), less_at, made)
                call = Call(space, head, stream=stream)
                for one in plan.launches:
                    one(call, {})
                if all(x is y for (_, x), y in zip(placed, given, strict=True)):
                    again.note(key, call)
            (d, d_v), sizes = self._dims, plan.sizes
            widths = (d, sizes.dq.width), (d, sizes.dk.width), (d_v, sizes.dv.width)
            dq, dk, dv = (
                x if keep == width else space.result(x, keep, width)
                for x, (keep, width) in zip(made[:3], widths, strict=True)
            )
            return dq, dk, dv


def _makers(space: arrays.TorchSpace, plan: Plan) -> list[Callable[[], Any]]:
    """Return five functions; each allocates one of the five arrays of `Plan.new_arrays`."""
    sizes, dtype, summed = plan.sizes, plan.dtype, plan.summed
    makers = [space.maker(x.shape, dtype) for x in (sizes.dq, sizes.dk, sizes.dv)]
    scratch = _none if summed is None else space.maker((summed + sizes.rows,))
    turns = partial(space.counters, (sizes.rows, 2)) if plan.ordered else _none
    return [*makers, scratch, turns]


def _none() -> None:
    """A function returns None if the pass does not need its array."""
