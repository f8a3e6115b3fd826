"""Pallas kernels, traced: their bytes are those of a hand count and of `flashsim.count`."""

import enum
import functools
import inspect
import re
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from jax.experimental.pallas import triton as plgpu  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # JAX 0.11 recommends another package
    from jax.experimental.pallas.ops.gpu import attention as jax_attention

from commands import invoke  # noqa: E402
from repository import loaded, recorded  # noqa: E402

import flashsim  # noqa: E402
from flashsim.errors import OptionError, UnsupportedError  # noqa: E402
from flashsim.jax import trace_kernel  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")

EXAMPLES = Path(__file__).parents[3] / "examples/pallas"


def example(name):
    return loaded(EXAMPLES / f"{name}.py")


GPU, TPU = example("gpu_forward"), example("tpu_forward")


def arrays(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def moved(traced):
    """Bytes by operation and tensor, of those that move any."""
    found = {}
    for op in ("load", "store", "reduce"):
        for tensor in traced.tensors:
            if nbytes := traced.bytes(op, tensor):
                found[op, tensor] = nbytes
    assert traced.trace.bytes() == sum(found.values())  # also as a trace like any other
    return found


def counted(traffic):
    """The same of `flashsim.count`."""
    found = Counter()
    for (_, op, tensor), nbytes in traffic.transfers.items():
        found[op, tensor] += nbytes
    return {key: nbytes for key, nbytes in found.items() if nbytes}


def cdiv(a, b):
    return -(-a // b)


def attention(q, k, v, causal):
    """O and L in float64; heads first; K and V may have fewer heads."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    s = q @ k.transpose(0, 2, 1) * q.shape[-1] ** -0.5
    if causal:
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
    m = s.max(-1, keepdims=True)
    p = np.exp(s - m)
    return p / p.sum(-1, keepdims=True) @ v, (m + np.log(p.sum(-1, keepdims=True)))[..., 0]


# -- forward -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "causal", "dtype"),
    [
        (128, 2, 2, False, "float32"),
        (128, 2, 2, True, "float32"),
        (100, 2, 2, True, "float32"),
        (100, 4, 2, False, "float16"),
        (128, 1, 1, True, "bfloat16"),
    ],
)
def test_forward_of_a_gpu(n, heads, kv_heads, causal, dtype):
    d, block_q, block_k = 16, 32, 16
    q, k, v = arrays((heads, n, d), (kv_heads, n, d), (kv_heads, n, d), dtype=dtype)

    traced = trace_kernel(GPU.forward, q, k, v, causal, block_q, block_k)

    item = q.dtype.itemsize
    keys = 0  # rows of K that the programs of one head load
    for i in range(cdiv(n, block_q)):
        last = min((i + 1) * block_q, cdiv(n, block_k) * block_k) if causal else n
        keys += min(cdiv(last, block_k) * block_k, n)
    assert moved(traced) == {
        ("load", "Q"): heads * n * d * item,
        ("load", "K"): heads * keys * d * item,
        ("load", "V"): heads * keys * d * item,
        ("store", "O"): heads * n * d * item,
        ("store", "L"): heads * n * 4,
    }
    problem = flashsim.Problem(
        n_q=n, head_dim=d, heads=heads, kv_heads=kv_heads, dtype=dtype, causal=causal
    )
    assert traced.problem == problem
    count = flashsim.count(problem, tiling=flashsim.Tiling(block_q, block_k))
    assert moved(traced) == counted(count)
    o, lse = attention(q, k, v, causal)
    error = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(traced.outputs["O"], float), o, atol=error)
    np.testing.assert_allclose(traced.outputs["L"], lse, atol=error)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keep_last", [False, True])
def test_forward_of_a_tpu(causal, keep_last):
    heads, n, d, block_q, block_k = 2, 128, 16, 32, 16
    q, k, v = arrays(*[(heads, n, d)] * 3)

    traced = trace_kernel(TPU.forward, q, k, v, causal, block_q, block_k, keep_last)

    blocks = n // block_k
    visits = sum(
        cdiv((i + 1) * block_q, block_k) if causal and keep_last else blocks
        for i in range(n // block_q)
    )
    if causal and keep_last:
        # The last tile's blocks and those of the next head's first tile differ, so each is copied.
        assert visits < blocks * (n // block_q)
    tile = block_k * d * 4
    assert moved(traced) == {
        ("load", "Q"): heads * n * d * 4,
        ("load", "K"): heads * visits * tile,
        ("load", "V"): heads * visits * tile,
        ("store", "O"): heads * n * d * 4,
    }
    np.testing.assert_allclose(traced.outputs["O"], attention(q, k, v, causal)[0], atol=1e-5)
    assert traced.trace.tiling == flashsim.Tiling(block_q, block_k)


# -- JAX's own kernels ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_jax_own_forward(causal):
    batch, n, heads, d, block_q, block_k = 2, 128, 2, 16, 64, 32
    q, k, v = arrays(*[(batch, n, heads, d)] * 3)
    sizes = jax_attention.BlockSizes(block_q, block_k)

    traced = trace_kernel(jax_attention.mha, q, k, v, None, d**-0.5, causal, sizes)

    tiles = [min(cdiv((i + 1) * block_q, block_k), 4) if causal else 4 for i in range(2)]
    keys = batch * heads * sum(tiles) * block_k * d * 4
    rows = batch * heads * n * d * 4
    expected = {("load", "Q"): rows, ("load", "K"): keys, ("load", "V"): keys, ("store", "O"): rows}
    assert moved(traced) == expected
    problem = flashsim.Problem(n_q=n, head_dim=d, batch=batch, heads=heads, causal=causal)
    count = counted(flashsim.count(problem, tiling=flashsim.Tiling(block_q, block_k)))
    del count["store", "L"]  # which `mha` keeps only for a backward pass
    assert expected == count
    o = np.stack(
        [attention(*(x[b].transpose(1, 0, 2) for x in (q, k, v)), causal)[0] for b in range(batch)]
    )
    np.testing.assert_allclose(traced.outputs["O"], o.transpose(0, 2, 1, 3), atol=1e-5)
    lines = Counter(line for (_, line) in traced.record.lines)
    source, first = inspect.getsourcelines(jax_attention.mha_forward_kernel)
    stand = {first + at for at, text in enumerate(source) if "plgpu.load" in text}
    assert stand <= set(lines)


@pytest.mark.parametrize("causal", [False, True])
def test_jax_own_backward(causal):
    n, heads, d, block = 128, 2, 16, 32
    q, k, v, do = arrays(*[(1, n, heads, d)] * 4)
    sizes = jax_attention.BlockSizes(block, block, block, block, block, block)

    def mha(q, k, v):
        return jax_attention.mha(q, k, v, None, d**-0.5, causal, sizes)

    def gradients(q, k, v, do):
        return jax.vjp(mha, q, k, v)[1](do)

    problem = flashsim.Problem(n_q=n, head_dim=d, heads=heads, causal=causal)
    traced = trace_kernel(gradients, q, k, v, do, names={"residual_refs[0]": "L"}, problem=problem)

    tiles = n // block
    pairs = tiles * (tiles + 1) // 2 if causal else tiles**2
    tile, row = heads * block * d * 4, heads * block * 4
    all_rows, all_stats = tiles * tile, tiles * row
    expected = {
        # Forward; then one kernel: dK and dV over all queries, then dQ over all keys.
        ("load", "Q"): all_rows + pairs * tile + all_rows,
        ("load", "K"): pairs * tile + all_rows + pairs * tile,
        ("load", "V"): pairs * tile + all_rows + pairs * tile,
        ("store", "O"): all_rows,
        ("store", "L"): all_stats,
        ("load", "O"): all_rows,
        ("load", "dO"): all_rows + pairs * tile + all_rows,
        ("store", "delta"): all_stats,
        ("load", "L"): pairs * row + all_stats,
        ("load", "delta"): pairs * row + all_stats,
        ("store", "dQ"): all_rows,
        ("store", "dK"): all_rows,
        ("store", "dV"): all_rows,
    }
    assert moved(traced) == expected
    tiling = flashsim.Tiling(block, block)
    count = Counter(counted(flashsim.count(problem, tiling=tiling)))
    count.update(counted(flashsim.count(problem, tiling=tiling, direction="backward")))
    assert moved(traced) == dict(count)
    with jax.default_matmul_precision("highest"):  # a GPU would round to TF32
        plain = jax.vjp(
            lambda q, k, v: jax_attention.mha_reference(q, k, v, None, d**-0.5, causal), q, k, v
        )[1](do)
    for name, gradient in zip(("dQ", "dK", "dV"), plain, strict=True):
        np.testing.assert_allclose(traced.outputs[name], gradient, atol=2e-5)
    source, first = inspect.getsourcelines(jax_attention.mha_backward_kernel)
    loads = {first + at for at, text in enumerate(source) if "plgpu.load" in text}
    assert loads <= {line for (_, line) in traced.record.lines}
    assert len(traced.record.launches) == 3


# -- right or wrong, needed or not -----------------------------------------------------------------


def altered(before, after):
    """The example's forward pass with one change, as a file's function."""
    text = (EXAMPLES / "gpu_forward.py").read_text()
    assert before in text
    scope = {"__name__": "altered"}
    exec(compile(text.replace(before, after), str(EXAMPLES / "gpu_forward.py"), "exec"), scope)
    return scope["forward"]


def line_of(text):
    (found,) = [
        number
        for number, line in enumerate((EXAMPLES / "gpu_forward.py").read_text().splitlines(), 1)
        if text in line
    ]
    return found


@pytest.mark.parametrize(
    ("before", "after", "mistake"),
    [
        ("", "", ""),
        ("acc * alpha[:, None] + pv", "acc + pv", "O is not multiplied by exp"),
        ("l * alpha + p.sum(axis=1)", "l + p.sum(axis=1)", "l is not multiplied by exp"),
        ("jnp.float32) * scale", "jnp.float32)", "not multiplied by the scale"),
        (">= keys[None, :])", "> keys[None, :])", "shifted by one"),
        ("m + jnp.log(l)", "m * 1.44269504 + jnp.log2(l)", "in base 2"),
        ("(acc / l[:, None])", "(acc)", "not divided by l at the end"),
    ],
)
def test_a_mistake_is_found_and_explained(before, after, mistake):
    q, k, v = arrays(*[(2, 128, 16)] * 3)
    traced = trace_kernel(altered(before, after) if mistake else GPU.forward, q, k, v, True, 32, 16)

    verdict = traced.check()

    assert verdict.right == (not mistake)
    assert mistake in verdict.mistake
    if mistake:
        stored = "plgpu.store(lse_ref" if "base 2" in mistake else "plgpu.store(o_ref"
        assert verdict.line == line_of(stored)
        assert verdict.program == (0, 0)


def test_bytes_that_are_not_needed_are_named_with_their_lines():
    q, k, v = arrays(*[(2, 128, 16)] * 3)
    every = "end if causal else pl.cdiv(n, block_k)"
    again = "        k = plgpu.load(k_ref.at[tile, :], mask=keys[:, None] < n, other=0.0)\n"

    def reasons(forward):
        traced = trace_kernel(forward, q, k, v, True, 32, 16)
        return {row.tensor: row.reasons for row in traced.byte_rows if row.reasons}

    assert reasons(GPU.forward) == {}
    found = reasons(altered(every, "pl.cdiv(n, block_k)"))
    assert {tensor: [r.kind for r in found[tensor]] for tensor in found} == {
        "K": ["masked tiles"],
        "V": ["masked tiles"],
    }
    # Row tile i of 4 needs 2 (i + 1) of the 8 key tiles.
    assert found["K"][0].nbytes == 2 * (6 + 4 + 2) * 16 * 16 * 4
    assert found["K"][0].lines == (line_of("k = plgpu.load"),)
    (twice,) = reasons(altered(again, again + again))["K"]
    assert "loaded twice by every program" in twice.text
    assert twice.lines == (line_of("k = plgpu.load") + 1,)


def test_jax_own_log_sum_exp_is_in_base_2():
    q, k, v = arrays(*[(1, 64, 2, 16)] * 3)
    sizes = jax_attention.BlockSizes(32, 32)

    def mha(q, k, v):
        return jax_attention.mha(
            q, k, v, None, 0.25, False, sizes, return_residuals=True, num_warps=4
        )

    verdict = trace_kernel(mha, q, k, v, names={"residual_refs[0]": "L"}).check()

    assert [(one.tensor, one.right) for one in verdict.outputs] == [("O", True), ("L", False)]
    assert "base 2" in verdict.mistake


# -- what kernels are made of ----------------------------------------------------------------------


def spec(shape=None, index=None, **more):
    return pl.BlockSpec(shape, index, **more)


BY_ONE = lambda i: (i,)  # noqa: E731 - the index of block i of a vector


def called(kernel, *given, out, dtype="float32", **more):
    """Call a kernel; `out` is the shape of its result, or a list of shapes."""
    shapes = [jax.ShapeDtypeStruct(x, dtype) for x in (out if isinstance(out, list) else [out])]
    return pl.pallas_call(kernel, out_shape=shapes if isinstance(out, list) else shapes[0], **more)(
        *given
    )


def run(kernel, *given, model=None, **more):
    """Trace a function that calls one kernel with arrays."""
    return trace_kernel(functools.partial(called, kernel, **more), *given, model=model)


def equal(traced, name, wanted):
    np.testing.assert_array_equal(traced.outputs[name], wanted)


def test_a_tpu_keeps_a_block_and_a_gpu_loads_it_again():
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    rows = spec((8, 16), lambda i: (i, 0))
    how = {"in_specs": [rows, spec((16, 16), lambda i: (0, 0))], "out_specs": rows}
    x, w = arrays((32, 16), (16, 16))
    on_tpu, on_gpu, unmarked = (
        run(kernel, x, w, out=(32, 16), grid=(4,), model=model, **how)
        for model in ("tpu", "gpu", None)
    )

    assert on_tpu.bytes("load", "w") == 16 * 16 * 4
    assert on_gpu.bytes("load", "w") == 4 * 16 * 16 * 4
    assert on_tpu.bytes("load", "x") == on_gpu.bytes("load", "x") == 32 * 16 * 4
    assert "tpu model" in on_tpu.record.source
    assert "gpu model" in on_gpu.record.source
    assert any("TPU model" in note for note in on_tpu.record.notes)
    equal(on_tpu, "O", on_gpu.outputs["O"])
    assert unmarked.bytes() == on_gpu.bytes()  # no mark of a TPU in it


def test_get_and_swap_are_at_their_lines():
    def kernel(x_ref, o_ref):
        one = x_ref[0:4, :]
        two = x_ref[4:8, :]
        o_ref[...] = one + two

    (x,) = arrays((8, 4))
    traced = run(kernel, x, out=(4, 4))

    first = kernel.__code__.co_firstlineno
    lines = [traced.record.lines[line] for line in traced.record.accesses["line"]]
    assert lines == [(__file__, first + n) for n in (1, 2, 3)]
    equal(traced, "O", x[:4] + x[4:])


def test_masked_lanes_move_nothing_and_read_the_other_value():
    def kernel(x_ref, o_ref, p_ref):
        few = jnp.arange(8) < 3
        o_ref[...] = plgpu.load(x_ref, mask=few, other=7.0)
        p_ref[...] = plgpu.load(x_ref, mask=few)
        plgpu.store(o_ref, jnp.full(8, 9.0), mask=jnp.arange(8) == 7)

    (x,) = arrays((8,))
    traced = run(kernel, x, out=[(8,)] * 2)

    assert traced.bytes("load", "x") == 2 * 3 * 4
    assert traced.bytes("store", "O") == (8 + 1) * 4
    assert list(traced.record.accesses["masked"]) == [5, 0, 5, 0, 7]
    equal(traced, "O", [*x[:3], 7, 7, 7, 7, 9])
    np.testing.assert_array_equal(np.isnan(traced.outputs["P"]), np.arange(8) >= 3)


def test_a_ragged_block_counts_lanes_outside_and_poisons_them():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].sum(keepdims=True)

    blocks = {"in_specs": [spec((4,), BY_ONE)], "out_specs": spec((1,), BY_ONE)}
    traced = run(kernel, *arrays((6,)), out=(2,), grid=(2,), **blocks)

    assert traced.bytes("load", "x") == 6 * 4
    assert list(traced.record.accesses["outside"]) == [0, 0, 2, 0]
    np.testing.assert_array_equal(np.isnan(traced.outputs["O"]), [False, True])


def test_a_slice_past_the_head_is_outside_though_memory_goes_on():
    def kernel(x_ref, o_ref):
        o_ref[...] = plgpu.load(x_ref.at[pl.ds(pl.program_id(1) * 4, 4), :])

    heads = spec((None, 6, 2), lambda h, i: (h, 0, 0))
    tiles = spec((None, 4, 2), lambda h, i: (h, i, 0))
    how = {"grid": (2, 2), "in_specs": [heads], "out_specs": tiles}
    traced = run(kernel, *arrays((2, 6, 2)), out=(2, 8, 2), **how)

    assert traced.bytes("load", "x") == 2 * 6 * 2 * 4
    assert traced.record.accesses["outside"].sum() == 2 * 2 * 2


def test_loops_branches_and_calls():
    def kernel(x_ref, o_ref, last_ref):
        def add(j, total):
            return total + x_ref[j]

        i = pl.program_id(0)
        total = lax.fori_loop(0, 3, add, jnp.float32(0))  # a static length becomes a scan
        total = lax.fori_loop(0, i, add, total)

        @pl.when(i == pl.num_programs(0) - 1)
        def _():
            last_ref[...] = jax.jit(lambda x: x * 2)(total)[None]

        o_ref[...] = jax.numpy.where(i > 0, total, -total)[None]

    how = {"in_specs": [spec()], "out_specs": [spec((1,), BY_ONE), spec()]}
    traced = run(kernel, jnp.arange(8.0), out=[(4,), (1,)], grid=(4,), **how)

    assert traced.bytes("load", "x") == (4 * 3 + 0 + 1 + 2 + 3) * 4
    assert traced.bytes("store", "last") == 4
    equal(traced, "O", [-3, 3, 4, 6])
    equal(traced, "last", [12])


@pytest.mark.parametrize("step", [1, 2])
def test_indices_of_every_kind(step):
    def kernel(x_ref, o_ref, p_ref, r_ref):
        rows = 5 - 5 * (jnp.arange(3) % 2)
        o_ref[...] = x_ref[rows, 1]
        p_ref[...] = x_ref.at[2:8, :].at[pl.ds(0, 3, stride=step), 1:3][...]
        r_ref[...] = x_ref[3][None] + x_ref[rows[0], :]

    (x,) = arrays((8, 4))
    traced = run(kernel, x, out=[(3,), (3, 2), (1, 4)])

    assert traced.bytes("load", "x") == (3 + 6 + 4 + 4) * 4
    assert traced.record.accesses["distinct"][0] == 2  # row 5 twice
    equal(traced, "O", x[np.array([5, 0, 5]), 1])
    equal(traced, "P", x[2 : 2 + 3 * step : step, 1:3])
    equal(traced, "r", (x[3] + x[5])[None])


def test_blocks_by_element_and_squeezed():
    def kernel(x_ref, o_ref):
        assert x_ref.shape == (4, 2)
        o_ref[...] = x_ref[...].sum(axis=1)

    overlapping = spec((pl.Element(4), None, 2), lambda i: (2 * i, 1, 0))
    how = {"in_specs": [overlapping], "out_specs": spec((None, 4), lambda i: (i, 0))}
    (x,) = arrays((8, 3, 2))
    traced = run(kernel, x, out=(3, 4), grid=(3,), **how)

    assert traced.bytes("load", "x") == 3 * 4 * 2 * 4
    expected = np.stack([np.asarray(x)[2 * i : 2 * i + 4, 1].sum(axis=1) for i in range(3)])
    np.testing.assert_allclose(traced.outputs["O"], expected, rtol=1e-6)


@pytest.mark.parametrize("model", ["gpu", "tpu"])
def test_an_output_that_is_its_input(model):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + o_ref[...]

    half = spec((4,), BY_ONE)
    how = {"in_specs": [half], "out_specs": half, "input_output_aliases": {0: 0}}
    (x,) = arrays((8,))
    traced = run(kernel, x, out=(8,), grid=(2,), model=model, **how)

    assert len(traced.record.tensors) == 1
    assert traced.bytes("load") == (2 if model == "gpu" else 1) * 8 * 4
    assert traced.bytes("store") == 8 * 4
    equal(traced, traced.tensors[0], 2 * x)


def test_atomics_are_reductions_and_add_each_lane():
    def kernel(x_ref, _, o_ref):
        lane = jnp.arange(4)
        first = plgpu.atomic_add(o_ref, jnp.where(lane < 2, 0, 4 - lane), x_ref[...])
        del first
        plgpu.atomic_max(o_ref, 3, x_ref[0], mask=x_ref[0] > 0)

    how = {"in_specs": [spec((4,), BY_ONE), spec()], "out_specs": spec(), "grid": (2,)}
    x, bins = jnp.arange(1.0, 9.0), jnp.zeros(4)
    traced = run(kernel, x, bins, out=(4,), input_output_aliases={1: 0}, **how)

    assert traced.bytes("reduce") == 2 * (4 + 1) * 4
    (name,) = {traced.tensors[code] for code in traced.record.stored}
    equal(traced, name, [1 + 2 + 5 + 6, 4 + 8, 3 + 7, 5])


def test_an_old_value_that_is_used_is_a_load():
    def kernel(x_ref, o_ref):
        o_ref[...] = jax.ref.swap(x_ref, ..., jnp.zeros(4))

    traced = run(kernel, *arrays((4,)), out=(4,))

    assert traced.bytes("load", "x") == traced.bytes("store", "x") == 16


def test_vmap_adds_an_axis_that_programs_do_not_see():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * pl.program_id(0)

    half = spec((4,), BY_ONE)
    how = {"out": (8,), "grid": (2,), "in_specs": [half], "out_specs": half}
    (x,) = arrays((3, 8))
    traced = trace_kernel(jax.vmap(functools.partial(called, kernel, **how)), x)

    assert traced.record.launches[0].grid == (2, 3)
    assert traced.bytes("load", "x") == 3 * 8 * 4
    equal(traced, "O", x * np.repeat([0, 1], 4))


def test_copies_that_a_tpu_kernel_starts_itself():
    def kernel(x_hbm, y_hbm, buffer, semaphore):
        part = pl.ds(pl.program_id(0) * 4, 4)
        inward = pltpu.make_async_copy(x_hbm.at[part], buffer, semaphore)
        inward.start()
        inward.wait()
        buffer[...] = buffer[...] * 2
        outward = pltpu.make_async_copy(buffer, y_hbm.at[part], semaphore)
        outward.start()
        outward.wait()

    hbm, scratch = spec(memory_space=pl.ANY), [pltpu.VMEM((4, 2), jnp.float32)]
    how = {"in_specs": [hbm], "out_specs": hbm}
    how["scratch_shapes"] = [*scratch, pltpu.SemaphoreType.DMA]
    (x,) = arrays((8, 2))
    traced = run(kernel, x, out=(8, 2), grid=(2,), **how)

    assert moved(traced) == {("load", "x_hbm"): 64, ("store", "y_hbm"): 64}
    equal(traced, "y_hbm", 2 * x)
    assert traced.record.accesses["line"].size == 4


def test_a_pipeline_that_a_tpu_kernel_starts_itself():
    def inner(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    def kernel(x_hbm, y_hbm, o_hbm):
        across = spec((32, 128), lambda i, j: (i, j))
        blocks = [across, spec((32, 128), lambda i, j: (0, j))]
        pltpu.emit_pipeline(inner, grid=(4, 2), in_specs=blocks, out_specs=[across])(
            x_hbm, y_hbm, o_hbm
        )

    hbm = spec(memory_space=pl.ANY)
    x, y = arrays((128, 256), (32, 256))
    traced = run(kernel, x, y, out=(128, 256), in_specs=[hbm, hbm], out_specs=hbm)

    equal(traced, "O", x + np.tile(y, (4, 1)))
    assert "tpu model" in traced.record.source
    size = 32 * 128 * 4
    loads = {("load", "x_hbm"): 8 * size, ("load", "y_hbm"): 8 * size}
    assert moved(traced) == {**loads, ("store", "O"): 8 * size}
    assert min(row[0] for row in traced.by_line().rows) > 0


def test_scalars_that_are_prefetched_choose_blocks():
    def kernel(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + table_ref[pl.program_id(0)]

    blocks = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4,),
        in_specs=[spec((1, 8), lambda i, table: (table[i], 0))],
        out_specs=spec((1, 8), lambda i, table: (i, 0)),
    )
    table = jnp.array([2, 2, 0, 1], jnp.int32)
    (x,) = arrays((3, 8))
    traced = run(kernel, table, x, out=(4, 8), grid_spec=blocks)

    assert traced.bytes("load", "table") == 16
    assert traced.bytes("load", "x") == 3 * 8 * 4  # block 2 is kept for the second step
    equal(traced, "O", x[table] + table[:, None])


def test_scratch_of_one_scope_and_reads_of_a_chip_buffer_past_its_end():
    def kernel(x_ref, o_ref):
        def body(buffer):
            buffer[...] = x_ref[...]
            o_ref[...] = buffer[pl.ds(pl.program_id(0) * 2 + 1, 3)]

        pl.run_scoped(body, pltpu.VMEM((4,), jnp.float32))

    how = {"grid": (2,), "in_specs": [spec()], "out_specs": spec((3,), BY_ONE)}
    (x,) = arrays((4,))
    traced = run(kernel, x, out=(6,), model="tpu", **how)

    assert traced.bytes("load") == 16
    np.testing.assert_array_equal(traced.outputs["O"][:4], [*x[1:], x[3]])
    assert np.isnan(traced.outputs["O"][4:]).all()
    (note,) = [note for note in traced.record.notes if "outside" in note]
    assert f"line {kernel.__code__.co_firstlineno + 3} " in note


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def test_a_grid_that_returns_to_an_output_block_on_a_tpu():
    row = spec((1, 4), lambda k, i: (i, 0))
    how = {"out": (2, 4), "grid": (2, 2), "in_specs": [row], "out_specs": row}
    traced = run(copy, *arrays((2, 4)), model="tpu", **how)

    assert traced.bytes("store") == 4 * 16
    assert any("returns to a block of o" in note for note in traced.record.notes)
    assert traced.record.clashes == ()  # a TPU's steps follow one another
    (clash,) = run(copy, *arrays((2, 4)), model="gpu", **how).record.clashes
    assert clash.kind == "two stores"


def test_work_outside_of_the_kernels_is_named_and_not_counted():
    def transposed(x):
        return jax.jit(functools.partial(called, copy, out=(4, 8)))(x.T).reshape(-1)

    traced = trace_kernel(transposed, *arrays((8, 4)))

    assert traced.bytes() == 2 * 8 * 4 * 4
    (note,) = traced.record.notes
    assert "JAX computed transpose (128 B)." in note
    assert "reshape" not in note


def test_one_array_that_is_passed_twice_is_one_buffer_with_two_names():
    def kernel(a_ref, b_ref, o_ref):
        o_ref[...] = a_ref[...] * b_ref[...]

    (x,) = arrays((4,))
    traced = trace_kernel(
        lambda one: called(kernel, one["a"], one["b"], out=(4,)), {"a": x, "b": x}
    )

    assert traced.tensors == ("a", "b", "O")
    a, b, o = traced.record.tensors
    assert a.buffer == b.buffer != o.buffer


def test_refs_that_are_reshaped_and_transposed():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref.reshape(4, 4)[1:3, :].T + x_ref.at[:, 0:2].reshape(2, 8)[:, 2:4].sum()

    (x,) = arrays((8, 2))
    traced = run(kernel, x, out=(4, 2))

    whole = np.asarray(x)
    expected = whole.reshape(4, 4)[1:3].T + whole.reshape(2, 8)[:, 2:4].sum()
    np.testing.assert_allclose(traced.outputs["O"], expected, rtol=1e-5)
    assert traced.bytes("load", "x") == (8 + 4) * 4


# -- refusals --------------------------------------------------------------------------------------


def test_functions_that_call_no_kernel():
    (x,) = arrays((4,))
    with pytest.raises(OptionError, match=r"does not call pl\.pallas_call"):
        trace_kernel(lambda x: x + 1, x)
    with pytest.raises(OptionError, match=r"takes a function.*got 3"):
        trace_kernel(3, x)


def test_a_model_that_does_not_exist_or_does_not_fit():
    q, k, v = arrays(*[(1, 32, 16)] * 3)
    with pytest.raises(OptionError, match=r"no model 'cpu'; choose from gpu, tpu"):
        trace_kernel(GPU.forward, q, k, v, model="cpu")
    with pytest.raises(
        OptionError, match=r"m lies in the memory space vmem, which only a TPU has.*model='tpu'"
    ):
        trace_kernel(TPU.forward, q, k, v, False, 16, 16, model="gpu")


def tanh(x_ref, o_ref):
    o_ref[...] = plgpu.approx_tanh(x_ref[...])


def bitcast(x_ref, o_ref):
    o_ref[...] = x_ref.bitcast(jnp.int32)[...].astype(jnp.float32)


#: JAX's own enum needs absl, which JAX does not install.
MOSAIC = enum.Enum("MemorySpace", ["SMEM"], module="jax._src.pallas.mosaic_gpu.core")


@pytest.mark.parametrize(
    ("kernel", "shape", "how", "said"),
    [
        (tanh, (4,), {}, r"^line {} of .*program \(\).*write jax.numpy"),
        (bitcast, (4, 4), {}, r"^line {} of .*Bitcast.*index the ref"),
        (
            copy,
            (128,),
            {"in_specs": [spec(memory_space=MOSAIC.SMEM)]},
            r"in kernel copy, x lies in .*Mosaic GPU",
        ),
    ],
)
def test_kernels_that_are_refused_at_their_lines(kernel, shape, how, said):
    said = said.format(kernel.__code__.co_firstlineno + 1)
    with pytest.raises(UnsupportedError, match=said) as caught:
        run(kernel, *arrays(shape), out=shape, **how)
    assert str(caught.value).count("in program") <= 1


def test_jax_is_left_as_it_was_after_an_error():
    from jax._src import source_info_util

    before = source_info_util.current

    def broken(x):
        raise RuntimeError("in the reader's own code")

    with pytest.raises(RuntimeError, match="own code"):
        trace_kernel(broken, arrays((4,))[0])
    assert source_info_util.current is before


def test_an_argument_is_not_changed():
    def kernel(x_ref, o_ref):
        x_ref[...] = jnp.zeros(4)
        o_ref[...] = x_ref[...]

    x = np.ones(4, np.float32)
    run(kernel, x, out=(4,))

    np.testing.assert_array_equal(x, np.ones(4))


# -- the command -----------------------------------------------------------------------------------


def command(*words):
    """What `flashsim kernel` prints; an error is in the text."""
    done = invoke("kernel", *words)
    return done.exit_code, done.output


def test_the_command_answers_for_a_pallas_file(tmp_path):
    target = f"{EXAMPLES / 'gpu_forward.py'}:forward"
    code, text = command(target, "--causal", "-n", 128, "-d", 16, "--out", tmp_path)

    assert code == 0, text
    assert "O right" in text
    assert "L right" in text
    assert re.search(r"load K +24,576 +24,576 +16,384", text)  # 2 x (2 + 4) tiles of 32 rows
    assert "gpu model" in text
    assert (tmp_path / "forward.html").stat().st_size > 10_000
    assert len(text.splitlines()) <= 32


PRODUCT = """
import jax
from jax.experimental import pallas as pl


def kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] @ y_ref[...]


def product(x, y):
    m, n = x.shape
    whole = jax.ShapeDtypeStruct((m, y.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=whole)(x, y)


def nothing(q, k, v):
    return q
"""


def test_the_command_with_no_attention_and_with_no_kernel(tmp_path):
    """The two axes of x are not those of q."""
    path = tmp_path / "product.py"
    path.write_text(PRODUCT)

    code, text = command(f"{path}:product", "--set", "x=16x8", "--set", "y=8x4")
    assert code == 0, text
    assert re.search(r"load x +- +512|load x +512 ", text), text
    code, text = command(f"{path}:nothing")
    assert code == 2
    assert "nothing" in text
    assert "does not call pl.pallas_call" in text
    path.write_text(PRODUCT.replace("m, n = x.shape", "m, n, d = x.shape"))
    code, text = command(f"{path}:product", "--set", "x=16x8", "--set", "y=8x4")
    assert code == 2
    assert "`m, n, d = x.shape`: ValueError: not enough values to unpack" in text


def test_the_command_takes_a_model_and_other_arguments():
    target = f"{EXAMPLES / 'tpu_forward.py'}:forward"
    code, text = command(target, "--causal", "-n", 128, "-d", 16, "--set", "keep_last=False")

    assert code == 0, text
    line = 1 + (EXAMPLES / "tpu_forward.py").read_text().splitlines().index(
        "    def key_block(h, i, j):"
    )
    words = "4 K tiles whose scores are all masked are loaded, by 2 programs"
    assert f"{words}, line {line}" in text
    assert "note     forward uses the TPU model: " in text
    code, text = command(f"{EXAMPLES / 'gpu_forward.py'}:forward", "--model", "tpu", "-n", 64)
    assert "tpu model" in text


def test_the_command_refuses_a_pallas_file_without_a_function():
    code, text = command(EXAMPLES / "gpu_forward.py")
    assert code == 2
    assert "name the function that calls pl.pallas_call" in " ".join(text.split())


@pytest.mark.parametrize("causal", [True, False])  # a while loop, and a scan
def test_the_first_wrong_step_is_named_with_its_variable(causal, tmp_path):
    text = (EXAMPLES / "gpu_forward.py").read_text(encoding="utf-8")
    q, k, v = arrays(*[(2, 128, 32)] * 3)
    for find, put, wrong, right in (
        ("acc * alpha[:, None] + pv", "acc + pv", "acc", "m and l"),
        ("l * alpha + p.sum(axis=1)", "l + p.sum(axis=1)", "l", "m and acc"),
    ):
        path = tmp_path / f"wrong_{wrong}.py"
        path.write_text(text.replace(find, put), encoding="utf-8")
        verdict = trace_kernel(loaded(path).forward, q, k, v, causal).check()
        assert f"step 2, keys 32 to 63: {wrong} is wrong from row" in verdict.step
        assert verdict.step.endswith(f"{right} are still right")


def test_counters_of_an_h100():
    """docs/data/pallas-counters-h100.csv: read from L2 or hit in L1, and written, to the byte.

    JAX's backward kernel spills registers at head_dim 128: it reads and writes more. Hits in L1 are
    counted in another pass of the profiler, in which other loads may hit: up to 128 B differ.
    """
    counted = recorded("pallas-counters-h100.csv")
    assert len(counted) == 13
    for row in counted:
        numbers = {key: int(x) for key, x in row.items() if key not in ("kernel", "shape")}
        read = numbers["read_bytes"] + numbers["l1_hit_bytes"]
        more = read - numbers["traced_load_sector_bytes"]
        written = numbers["written_bytes"] - numbers["traced_store_sector_bytes"]
        if row["kernel"] == "mha_backward" and " x 128" in row["shape"]:
            assert more > 0
            assert written > 0
        else:
            assert -128 <= more <= 0, row
            assert written == 0, row
