"""`flashsim.cuda.trace`: Numba-CUDA kernels under Numba's simulator, in a process of their own."""

import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import flashsim

pytestmark = pytest.mark.promise("three counts equal")

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples/numba_cuda/forward.py"
SIMULATED = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}


def child(*command, environment=SIMULATED):
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def facts():
    done = child("-W", "error", HERE / "cuda_cases.py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def line_of(text, path=HERE / "cuda_cases.py"):
    (found,) = [n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    return found


@pytest.mark.parametrize(("n", "causal"), [(32, True), (28, False)])
def test_flash2_is_counted_like_flash2(facts, n, causal):
    heads, d, block_q, block_k = 2, 16, 16, 8
    found = facts["forward 32 causal" if causal else "forward 28"]

    keys = sum(min(i + block_q, n) if causal else n for i in range(0, n, block_q))
    assert found["bytes"] == {
        "load Q": heads * n * d * 4,
        "load K": heads * keys * d * 4,
        "load V": heads * keys * d * 4,
        "store O": heads * n * d * 4,
        "store L": heads * n * 4,
    }
    assert found["problem"] == [n, heads, causal]
    assert found["tiling"] == [block_q, block_k]
    problem = flashsim.Problem(n_q=n, head_dim=d, heads=heads, causal=causal)
    count = Counter()
    tiling = flashsim.Tiling(block_q, block_k)
    for (_, op, tensor), nbytes in flashsim.count(problem, tiling=tiling).transfers.items():
        count[f"{op} {tensor}"] += nbytes
    assert found["bytes"] == {key: nbytes for key, nbytes in count.items() if nbytes}
    assert found["error"] < 1e-5
    assert found["output"]
    assert found["held"] == [block_k * d * 4] * 2
    texts = ("q[d] = Q", "k_tile[at // D, d] =", "v_tile[at // D, d] =", "O[head", "L[head")
    assert found["lines"] == sorted(line_of(text, EXAMPLE) for text in texts)
    (note, *_) = [note for note in found["notes"] if "load of Q" in note]
    assert f"line {line_of('q[d] = Q', EXAMPLE)} " in note
    assert not any("of K" in note or "of V" in note for note in found["notes"])


def test_neighbouring_threads_decide_the_sectors_of_a_request(facts):
    assert facts["columns"]["notes"] == []
    # 8 threads, each on a row of 256 bytes: 8 sectors of 4 bytes, and one would do.
    (note,) = facts["rows"]["notes"]
    assert "touches 8.0 sectors of 32 bytes, but its elements would fit in 1" in note
    assert facts["columns"]["bytes"] == {"load x": 8 * 64 * 4, "store O": 64 * 4}
    assert facts["rows"]["bytes"] == {"load x": 8 * 64 * 4, "store O": 8 * 4}
    assert facts["strided"]["bytes"]["load x"] == 8 * 32 * 4


def test_atomics_are_reductions(facts):
    found = facts["histogram"]
    assert found["bytes"] == {"load x": 2 * 10 * 8, "reduce bins": 2 * 10 * 8}
    assert found["args"][1] == [3, 3, 2, 2, 9]
    assert found["programs"] == [0, 1, 2]


def test_accesses_past_the_end_are_outside(facts):
    found = facts["past"]
    assert found["outside"] == 2
    assert found["bytes"] == {"load x": 6 * 8, "store O": 8 * 8}
    assert found["args"][1] == [1, 2, 3, 4, 5, 6, 1, 1]
    assert facts["device"]["outside"] == 0


def test_threads_that_create_a_shared_array_at_once_get_the_same(facts):
    assert facts["exchanged"]["args"][1] == [3, 2, 1, 0]


def test_blocks_that_store_one_element(facts):
    assert facts["same"]["clashes"] == ["two stores"]
    assert facts["columns"]["clashes"] == []


@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        ("one line", r"^UnsupportedError: line {a, b = cuda.shared} of .*two shared arrays"),
        ("shuffles", r"^UnsupportedError: line {x\[0\] = cuda.shfl_sync} of .*simulator lacks"),
        ("divides", r"^ValueError: .*line {x\[i\] = math.log} of .*flashsim.cuda.trace"),
        ("slices", r"^UnsupportedError|.*one element at a time"),
        ("list", r"^DTypeError: argument 0 must be an array or a number, got \[1.0\]"),
        ("big", r"^OptionError: a thread block of shape .* has 2,048 threads"),
        ("function", r"^DTypeError: .*needs a kernel .*@numba.cuda.jit.*got <built-in"),
        (
            "names",
            r"^OptionError: names= contains 'x', which is not a parameter of the kernel; "
            r"choose from out",
        ),
        (
            "no grid",
            r"^OptionError: kernel never_launched was passed without its grid and block; "
            r"write trace\(kernel\[grid, block\], \.\.\.\)$",
        ),
    ],
)
def test_refusals(facts, case, pattern):
    pattern = re.sub(r"\{(.*?)\}", lambda hit: str(line_of(hit[1].replace("\\", ""))), pattern)
    assert re.search(pattern, facts[case], re.S), facts[case]


def test_the_simulator_is_left_as_it_was(facts):
    assert facts["restored"] == [True, True]


def test_a_kernel_for_a_gpu_is_refused_and_says_what_to_set():
    plain = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    done = child(EXAMPLE, environment=plain)
    assert done.returncode == 1
    assert "BackendUnavailable: flashsim.cuda.trace" in done.stderr
    assert "set NUMBA_ENABLE_CUDASIM=1 in the environment before Python starts" in done.stderr


def test_the_example_runs(facts):
    assert "forward: loads and stores by line (numba" in facts["example"]


def test_importing_needs_no_numba():
    code = "import sys, flashsim.cuda; sys.exit('numba' in sys.modules)"
    assert child("-c", code).returncode == 0
    assert list(inspect.signature(flashsim.cuda.trace).parameters)[:2] == ["kernel", "args"]
