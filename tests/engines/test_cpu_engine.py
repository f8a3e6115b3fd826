"""The CPU engine beyond its numbers (those are in test_engines.py): traces, bits, code, errors."""

import dataclasses
import itertools
import os
import platform
import subprocess
import sys
import tracemalloc
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from helpers import FLOAT64, Judge, Target, run_both, tensors
from numba import njit
from test_engines import OPTION_CASES, SIZES, check
from unoptimised import HERE_TOO

import flashsim
from flashsim import BackendUnavailable, Device, OptionError, SramOverflow, Tiling, UnsupportedError
from flashsim.engines.cpu import engine as cpu
from flashsim.engines.cpu import notes, threads, work_tiles
from flashsim.engines.cpu.micro_kernels import registers
from flashsim.engines.cpu.tables import NOTE
from flashsim.engines.protocol import Job
from flashsim.errors import MemoryModelError
from flashsim.schedule.plans import stages
from flashsim.schedule.schedule import Schedule

SMALL = dataclasses.replace(Device.get("H100"), sram_bytes=4096)
NUMPY, NUMBA = Target("simulator"), Target("numba", cpu.ALGORITHMS)
vector_only = pytest.mark.skipif(
    isinstance(registers.best("float32"), registers.Plain),
    reason="needs a CPU with AVX2 and FMA, AVX-512 or NEON",
)


def both(x, algorithm, backend=NUMBA, **options):
    """(result, gradients, arrays by name) of one backend."""
    return run_both(x, backend, algorithm, **options)


def assert_same_traces(x, algorithm, **options):
    ours, theirs = (both(x, algorithm, t, trace=True, **options)[:2] for t in (NUMBA, NUMPY))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.trace.same_events(other.trace)
        assert mine.trace.transfers == other.trace.transfers


def assert_same_bits(a, b):
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)


# -- traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", OPTION_CASES)
@pytest.mark.parametrize("algorithm", cpu.ALGORITHMS)
@pytest.mark.promise("three counts equal")
def test_trace_equals_the_simulators(algorithm, case, dtype):
    shape, options = OPTION_CASES[case]
    x = tensors(113, 203, 16, dtype=dtype, **shape)
    assert_same_traces(x, algorithm, **{"tiling": Tiling(32, 48), **options})


@pytest.mark.parametrize(("n_q", "n_kv"), SIZES)
@pytest.mark.parametrize("algorithm", cpu.ALGORITHMS)
@pytest.mark.promise("three counts equal")
def test_trace_equals_the_simulators_at_any_size(algorithm, n_q, n_kv):
    x = tensors(n_q, n_kv, 8, dtype="float64", heads=1)
    assert_same_traces(x, algorithm, tiling=Tiling(32, 48), causal=True)


@pytest.mark.promise("three counts equal")
def test_a_tile_that_was_not_visited_is_missing_from_the_trace():
    problem = flashsim.Problem(n_q=40, n_kv=40, head_dim=8, heads=2)
    schedule = Schedule(problem, Tiling(16, 16))
    steps = np.array([[16, 16, 8]] * 2)
    visits = np.full((2, 1, schedule.n_visits), 16 * NOTE + 16)
    stage = stages(problem, "flash2")[0]
    device = Device.get("H100")
    full = notes.stage_trace(stage, schedule, device, steps, visits).events
    visits[:, 0, 4] = 0
    less = notes.stage_trace(stage, schedule, device, steps, visits).events
    assert set(full["visit"]) - set(less["visit"]) == {4}
    np.testing.assert_array_equal(full[full["visit"] != 4], less)
    visits[1, 0, 5] = 0
    with pytest.raises(MemoryModelError, match="two heads did not visit the same tiles"):
        notes.stage_trace(stage, schedule, device, steps, visits)


def test_no_trace_unless_asked_for():
    x = tensors(20, 20, 8)
    result, gradients, _ = both(x, "flash2")
    assert not result.traced
    assert not gradients.traced


# -- every option in the other types (float32 and bfloat16 are in test_engines.py) ----------------


@pytest.mark.parametrize("dtype", [FLOAT64, "float16"])
@pytest.mark.parametrize("case", OPTION_CASES)
@pytest.mark.parametrize("algorithm", cpu.ALGORITHMS)
def test_options_in_other_types(algorithm, case, dtype):
    shape, options = OPTION_CASES[case]
    x = tensors(113, 203, 16, dtype=dtype, **shape)
    check(x, NUMBA, algorithm, **{"tiling": Tiling(32, 48), **options})


# -- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"heads": 1}, {"causal": True}),
        ({"heads": 4, "kv_heads": 2, "batch": 2}, {}),
        ({"heads": 4, "kv_heads": 2, "batch": 2, "bias": (1, 1)}, {"causal": True}),
        ({"heads": 2, "batch": 2, "bias": (1, 2)}, {"key_order": "descending"}),
    ],
)
@pytest.mark.parametrize("algorithm", cpu.ALGORITHMS)
@pytest.mark.promise("deterministic")
def test_bits_do_not_depend_on_the_number_of_threads(algorithm, shape, options):
    x = tensors(150, 170, 16, **shape)
    one, *more = (
        both(x, algorithm, tiling=Tiling(16, 16), threads=n, **options)[2] for n in (1, 2, 3, 5)
    )
    for several in more:
        assert_same_bits(one, several)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", cpu.ALGORITHMS)
def test_halves_of_an_odd_number_and_at_odd_addresses(algorithm, dtype):
    """A walk takes two of them for a float: neither may move, and the last is there, too."""

    def moved(array):
        room = np.zeros(array.size + 1, array.dtype)
        room[1:] = array.reshape(-1)
        return room[1:].reshape(array.shape)

    x = tensors(33, 37, 7, heads=1, dtype=dtype, dv=5)
    check(x, NUMBA, algorithm, tiling=Tiling(16, 16))
    here = both(x, algorithm, tiling=Tiling(16, 16))[2]
    y = type(x)(**vars(x) | {name: moved(getattr(x, name)) for name in ("q", "k", "v")})
    assert y.q.ctypes.data % 4 == 2
    assert_same_bits(here, both(y, algorithm, tiling=Tiling(16, 16))[2])


@pytest.mark.parametrize("n_q", [1, 300])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_widened_a_tile_at_a_time(n_q, dtype):
    """A pass takes less memory than its 16-bit keys alone would, were they floats."""
    x = tensors(n_q, 8192, 64, heads=4, dtype=dtype)
    run = lambda: flashsim.run(x.q, x.k, x.v, backend="numba", threads=1)  # noqa: E731
    run()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.k.nbytes


@pytest.mark.promise("deterministic")
def test_threads_that_meet_at_one_accumulator_keep_its_bits():
    """One head and enough work that threads overlap: without turns, dQ's sums change order."""
    x = tensors(1500, 1500, 16, heads=1)
    one, *more = (
        both(x, "flash2-fused", tiling=Tiling(32, 32), threads=n)[2] for n in (1, 2, 3, 2, 3)
    )
    for several in more:
        assert_same_bits(one, several)


RUNS = {
    "causal": {"causal": True},
    "descending": {"causal": True, "key_order": "descending"},
    "window": {"window": (25, 9)},
    "mask": {"mask": lambda q, k: (q + k) % 7 != 0},
    "block-mask": {"block_mask": np.random.default_rng(1).random((8, 11)) < 0.4},
    "varlen": {"cu_seqlens_q": (0, 40, 40, 113), "cu_seqlens_k": (0, 60, 80, 170), "causal": True},
}


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("algorithm", cpu.ALGORITHMS)
def test_tiles_walked_together_keep_their_bits_and_traces(algorithm, case, monkeypatch):
    x = tensors(113, 170, 16, heads=8, kv_heads=4)
    options = {"tiling": Tiling(16, 16), "threads": 1, "trace": True, **RUNS[case]}
    real, longest = work_tiles.runs, {}

    def noted(*args, **more):
        runs = real(*args, **more)
        longest.setdefault(work_tiles.TOGETHER, []).append(np.diff(runs).max())
        return runs

    monkeypatch.setattr(work_tiles, "runs", noted)
    runs = []
    for together in (1 << 18, 0):
        work_tiles._known.cache_clear()  # tables of an earlier test
        monkeypatch.setattr(work_tiles, "TOGETHER", together)
        runs.append(both(x, algorithm, **options))
    work_tiles._known.cache_clear()
    grouped, alone = runs
    assert sum(n > 1 for n in longest[1 << 18]) == 2  # forward, and keys outside
    assert set(longest[0]) == {1}
    assert_same_bits(grouped[2], alone[2])
    for ours, theirs in zip(grouped[:2], alone[:2], strict=True):
        assert ours.trace.same_events(theirs.trace)


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_last_run_is_handed_out_tile_by_tile(fused, order):
    """So that threads end about together; every tile once, fused in the order of turns."""
    problem = flashsim.Problem(640, causal=True)
    outer = "keys" if fused else "queries"
    schedule = Schedule(problem, Tiling(64, 64), outer, key_order=order)
    csr = schedule.col_csr if fused else schedule.row_csr
    (even, spread) = (
        [(int(a), int(b)) for a, b in work_tiles.runs(schedule, csr, fused, 4, spread=spread)]
        for spread in (False, True)
    )
    last = even[-1]
    assert spread[: len(even) - 1] == even[:-1]
    assert sorted(spread[len(even) - 1 :]) == [(i, i + 1) for i in range(*last)]
    walked = [i for first, end in spread for i in range(first, end)]
    assert sorted(walked) == list(range(10))
    if fused:
        firsts = [first for first, _ in spread]
        assert firsts == sorted(firsts, reverse=order == "descending")
    else:
        assert walked[0] == 6  # the longest first
        assert walked[-1] == 0  # the shortest last


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("algorithm", cpu.ALGORITHMS)
def test_what_is_called_finite_is(algorithm, dtype):
    """NaN in one place spreads over some results; of 16 bits nothing is said."""
    x = tensors(113, 150, 20, heads=2, dtype=dtype)
    problem = flashsim.Problem(113, 150, heads=2, head_dim=20, dtype=dtype)
    clean = {name: getattr(x, name) for name in ("q", "k", "v", "dout")}
    cases = [clean]
    for name, place in (("q", (0, 1, 112, 19)), ("v", (0, 0, 149, 3)), ("dout", (0, 1, 112, 0))):
        cases.append({**clean, name: clean[name].copy()})
        cases[-1][name][place] = np.nan
    large = np.where(np.arange(150) % 2, np.finfo(dtype).max / 2, 0).astype(dtype)
    keys = np.broadcast_to(large[:, None], x.k.shape)
    cases.append({**clean, "q": 0 * x.q, "k": keys, "dout": 1000 * x.dout})  # dQ alone overflows
    several = set()
    for arrays in cases:
        job = Job(problem, *(arrays[each] for each in "qkv"), algorithm=algorithm)
        ran = cpu.forward(job)
        back = cpu.backward(job, ran.saved, arrays["dout"])
        kept = {name: x for each in (ran, back) for name, x in each.arrays.items() if name != "lse"}
        whole = {name for name, array in kept.items() if np.isfinite(array).all()}
        several.add(frozenset(whole))
        if algorithm == "flash2-fused" and not {"dq", "dk", "dv"} <= whole:
            whole -= {"dq", "dk", "dv"}  # one walk writes all three
        elif not {"dk", "dv"} <= whole:
            whole -= {"dk", "dv"}
        assert ran.finite | back.finite == (set() if dtype == "float16" else whole)
    assert {"out", "dk", "dv"} in several


@pytest.mark.parametrize("bias", [(1, 1), (1, 4), (2, 1), (2, 4), None])
@pytest.mark.parametrize("by_row", [True, False])
def test_heads_that_share_a_bias_gradient_belong_to_one_thread(by_row, bias):
    """Threads that race for a gradient's tile seldom show it, so this looks at who takes what."""
    problem = flashsim.Problem(8, batch=2, heads=4, kv_heads=2, bias=bias)
    ptr, members = work_tiles.sets(problem, by_row, shares=True)
    heads = 4 if by_row else 2
    assert sorted(members) == list(range(2 * heads))
    batch, matrices = bias or (2, 4)
    owner = {}
    for number, (first, last) in enumerate(itertools.pairwise(ptr)):
        for head in members[first:last]:
            entry, at = divmod(int(head), heads)
            matrix = (entry if batch == 2 else 0, at if matrices == 4 else 0)
            assert owner.setdefault(matrix, number) == number
    assert len(owner) == len(ptr) - 1  # and no more is put together than must be


@pytest.mark.parametrize("algorithm", cpu.ALGORITHMS)
def test_masks_evaluated_in_pieces_change_nothing(algorithm, monkeypatch):
    x = tensors(113, 203, 8)
    options = {"tiling": Tiling(32, 48), "mask": lambda q, k: (q * k) % 3 != 1, "causal": True}
    whole = both(x, algorithm, **options)[2]
    monkeypatch.setattr(work_tiles, "MASK_CHUNK", 1)
    assert_same_bits(whole, both(x, algorithm, **options)[2])


def test_nan_stays_where_it_belongs():
    x = tensors(40, 50, 8, heads=2)
    x.q[0, 0, 7, 3] = np.nan
    out = flashsim.run(x.q, x.k, x.v, backend="numba").out
    assert np.isnan(out[0, 0, 7]).all()
    assert np.isnan(out).sum() == 8


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_is_linear_in_the_length():
    code = """
import numpy as np, flashsim
# ru_maxrss would start at the peak of the process that started this one
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
x = [np.ones((n, 8), np.float32) for n in (64, 6000)]
def go(a):
    flashsim.run(a, a, a, backend="numba", algorithm="flash2-fused").backward(a)
go(x[0])
before = peak()
go(x[1])
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(done.stdout) < 6000**2 / 2  # a byte for every second score


# -- options and errors ---------------------------------------------------------------------------


@vector_only
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param("flash2", marks=pytest.mark.thorough),
        pytest.param("flash2-fused", marks=pytest.mark.kernels),  # each operation: test_panels.py
    ],
)
def test_plain_definitions_give_the_same_results(algorithm):
    x = tensors(60, 70, 16, kind="rising", heads=4, kv_heads=2)
    options = {"tiling": Tiling(32, 32), "causal": True}
    result, _, plain = both(x, algorithm, micro_kernel="plain", **options)
    vector = both(x, algorithm, micro_kernel="vector", **options)[2]
    judge = Judge.of(x, result.problem)
    judge.check(plain)
    judge.check(vector)
    assert result.kernel == f"numba plain, {threads.available()} threads"


def test_errors():
    x = tensors(20, 20, 8)
    run = lambda **options: flashsim.run(x.q, x.k, x.v, backend="numba", **options)  # noqa: E731
    with pytest.raises(UnsupportedError, match="runs flash2 and flash2-fused, not 'standard'"):
        run(algorithm="standard")
    with pytest.raises(UnsupportedError, match="pass one as backend=, or pass trace=True"):
        run(trace="timeline")
    with pytest.raises(OptionError, match=r"unknown micro_kernel 'vectr'.*did you mean 'vector'"):
        run(micro_kernel="vectr")
    with pytest.raises(SramOverflow, match="largest tiling that fits"):
        run(tiling=Tiling(20, 20), device=SMALL)


def test_a_device_without_room_for_the_usual_tiling_gets_one_that_fits():
    x = tensors(300, 300, 64)
    result, gradients, _ = both(x, "flash2", device=SMALL, trace=True)
    assert result.trace.peak_sram() <= 4096
    assert gradients.trace.peak_sram() <= 4096


def test_vector_code_is_refused_where_registers_are_unknown(monkeypatch):
    monkeypatch.setattr(registers, "_host", lambda: registers.Plain)
    x = tensors(5, 5, 4)
    with pytest.raises(BackendUnavailable, match="micro_kernel='plain', which runs on any"):
        flashsim.run(x.q, x.k, x.v, backend="numba", micro_kernel="vector")
    assert registers.best("float32") == registers.Plain(16)


OLD = dict.fromkeys(("avx", "avx2", "fma"), True)
NEW = {**OLD, "avx512f": True, "avx512vl": True}


@pytest.mark.parametrize(
    ("features", "machine", "name", "given", "kind"),
    [
        (OLD, "x86_64", None, None, registers.Avx2),
        (NEW, "", None, None, registers.Avx512),
        ({**OLD, "fma": False}, "x86_64", None, None, registers.Plain),
        ({}, "aarch64", None, None, registers.Neon),
        (NEW, "x86_64", None, "-avx512f", registers.Avx2),
        (NEW, "x86_64", None, "-avx512vl", registers.Avx2),
        (NEW, "x86_64", None, "+avx2,+fma", registers.Avx512),  # LLVM knows what this CPU has
        (NEW, "x86_64", None, "-avx2", registers.Plain),  # AVX-512 needs it
        (NEW, "x86_64", "haswell", "+avx,+avx2,+fma", registers.Avx2),
        (NEW, "x86_64", "haswell", None, registers.Avx512),  # Numba gives LLVM all of this CPU
        (NEW, "x86_64", "generic", "", registers.Plain),
    ],
)
def test_registers_are_those_of_the_cpu_that_numba_compiles_for(
    features, machine, name, given, kind, monkeypatch
):
    """`name` and `given` are Numba's settings."""
    has = llvm.FeatureMap(features)
    monkeypatch.setattr(registers.llvm, "get_host_cpu_features", lambda: has)
    monkeypatch.setattr(registers.platform, "machine", lambda: machine)
    monkeypatch.setattr(registers.config, "CPU_NAME", name)
    monkeypatch.setattr(registers.config, "CPU_FEATURES", given)
    monkeypatch.setattr(registers.config, "ENABLE_AVX", True)
    assert registers._host.__wrapped__() is kind


def test_the_environment_says_what_numba_compiles_for():
    code = "import flashsim.engines.cpu.micro_kernels.registers as r; print(r.best('float32'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    # On Arm even the generic CPU has its vectors.
    assert done.stdout.startswith("Neon" if platform.machine() in ("aarch64", "arm64") else "Plain")


# -- compilation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("terminal", "patience", "told"), [(1, 0.01, 1), (0, 0.01, 0), (1, 99, 0)])
def test_long_compilation_is_announced_on_a_terminal(terminal, patience, told, monkeypatch, capsys):
    @njit
    def walk(x, counter):
        return x

    monkeypatch.setitem(threads._KERNELS, "forward", walk)
    monkeypatch.setattr(threads, "PATIENCE", patience)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: bool(terminal))
    counter = np.zeros(3, np.int64)
    threads.run("forward", 1, 1, counter, counter=counter)
    assert ("compiling the CPU kernels" in capsys.readouterr().err) == bool(told)
    threads.run("forward", 1, 1, counter, counter=counter)  # compiled by now
    assert not capsys.readouterr().err


@pytest.mark.parametrize("algorithm", cpu.ALGORITHMS)
def test_no_option_compiles_a_walk_anew(algorithm):
    """Compiling takes seconds: what a walk is handed has the same types, whatever is asked for."""
    run = lambda case: both(tensors(113, 203, 16, **case[0]), algorithm, **case[1])  # noqa: E731
    run(OPTION_CASES["causal"])
    compiled = {name: list(walk.signatures) for name, walk in threads._KERNELS.items()}
    for name in OPTION_CASES:
        if "block-mask-of-tiles" not in name:  # a grid of tiles that are not asked for here
            run(OPTION_CASES[name])
    assert {name: list(walk.signatures) for name, walk in threads._KERNELS.items()} == compiled


def test_the_cache_is_keyed_by_every_source():
    """Numba alone would miss an edit of a file that the cached function calls into."""
    walk = threads._ALL["delta"]
    old, new = (threads._entry("delta", walk, text) for text in ("old", "new"))
    keys = [f._cache._index_key(("signature",), f.targetctx.codegen()) for f in (old, new)]
    assert keys[0] != keys[1]
    assert len(threads._digest()) == 64


# -- interrupts and threads -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        *((n, f"at most .*, got {n}; .* CPUs") for n in (65 * 10**4, 10**6, 2**63, 2**70)),
        *((n, f"a positive integer, got {n!r}") for n in (-1, 0, False, True, 1.5, 2.0, "2")),
        *((x, "a positive integer, got") for x in (None.__class__, [2])),
    ],
)
def test_other_numbers_of_threads_are_refused(given, text):
    x = tensors(5, 5, 4)
    with pytest.raises(OptionError, match=f"threads= must be {text}"):
        flashsim.run(x.q, x.k, x.v, backend="numba", threads=given)


#: Prints how long the main thread takes to hear an interrupt of each kind of walk: CPU seconds of
#: the process, divided by the walk's threads. An idle machine's clock shows about the same. On a
#: busy one the clock goes on while the process waits for a CPU.
INTERRUPTED = """
import dataclasses, os, signal, threading, time
import numpy as np, flashsim
from flashsim.engines.cpu import engine, thread_pool, threads
from flashsim.engines.cpu.tables import Tiles
from flashsim.engines.protocol import Job
WALKERS = 2
walked, real = [], threads.run
def run(name, *args, counter, long):
    if long and name != "delta":  # which is over at once
        walked[:] = counter, next(x for x in args if isinstance(x, Tiles))
    real(name, *args, counter=counter, long=long)
threads.run = run
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
q = np.random.default_rng(0).standard_normal((1, 48_000, 16), dtype=np.float32)
small = q[:, :64]
result = flashsim.run(small, small, small, backend="numba")
# A walk that has begun is interrupted: the forward pass itself, or a backward of made-up results.
problem = flashsim.Problem(48_000, head_dim=16)
given = {"algorithm": "flash2-fused", "options": {"threads": WALKERS}}
big = Job(problem, *(a[None] for a in (q, q, q)), **given)
saved = {"O": q[None], "L": np.full((1, 1, 48_000), 11, np.float32)}
def forward():
    return flashsim.run(small, small, small, backend="numba").out
def fused():
    return result.backward(small, deterministic=False).dq
def dq():
    return result.backward(small, deterministic=True).dq
def interrupted(what, work, long):
    expected = work()  # compiled
    others, at, ended = [], [], threading.Event()
    walked.clear()
    def other():
        while not ended.is_set() and (not at or time.process_time() < at[0] + 0.2):
            others.append(np.array_equal(work(), expected))
    def interrupt():
        while not (walked and walked[0][0] > 3 * WALKERS):  # they are under way
            time.sleep(0.01)
        at.append(time.process_time())
        os.kill(os.getpid(), signal.SIGINT)
    beside = threading.Thread(target=other)
    beside.start()
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        long()
        ended.set()
        raise SystemExit(f"{what} was not interrupted")
    except KeyboardInterrupt:
        took = (time.process_time() - at[0]) / WALKERS
        beside.join()
        assert np.array_equal(work(), expected)
        assert others and all(others)
        pool = thread_pool.pool()
        assert len(pool.free) == pool.size
        counter, tiles = walked
        assert counter[0] < len(tiles.runs) * (len(tiles.set_ptr) - 1)  # they were told to leave
        print(what, took)
interrupted("forward", forward, lambda: engine.forward(big))
interrupted("fused", fused, lambda: engine.backward(big, saved, q[None]))
big = dataclasses.replace(big, algorithm="flash2")
interrupted("dq", dq, lambda: engine.backward(big, saved, q[None]))
"""


def test_an_interrupt_is_heard_within_a_second():
    done = subprocess.run(
        [sys.executable, "-c", f"{HERE_TOO}\n{INTERRUPTED}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    heard = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert list(heard) == ["forward", "fused", "dq"]
    for what, seconds in heard.items():
        assert float(seconds) < 1, what
