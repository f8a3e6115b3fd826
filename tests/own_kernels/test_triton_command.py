"""`flashsim kernel`: readers' files, as they are handed out; and what the guide says it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from commands import checked, invoke, refused

from flashsim.triton.driver import standing_in

pytestmark = pytest.mark.promise("command line equals library")

ROOT = Path(__file__).parents[2]
FLASH = ROOT / "examples/triton/flash_attention.py"
HOMEWORK = ROOT / "examples/triton/homework.py"


def test_the_guide_prints_what_comes_out(tmp_path):
    """Every line of its blocks of output; numbers are compared apart: CPUs round differently."""
    page = (ROOT / "docs/guides/triton.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```", page, re.S | re.M)
    usual = checked(f"{HOMEWORK}:attention", "--causal")
    ragged = checked(f"{HOMEWORK}:attention", "--causal", "-n", 250)
    number = re.compile(r"-?\d[\d.,]*(e[-+]\d+)?")
    right = (ROOT / "examples/triton/flash_attention.py").read_text(encoding="utf-8").splitlines()
    assert right[118].endswith(" * scale")  # the guide says line 119
    right[118] = right[118].removesuffix(" * scale")
    (tmp_path / "gradients.py").write_text("\n".join(right), encoding="utf-8")
    gradients = checked(f"{tmp_path}/gradients.py:backward", "--causal")
    assert len(blocks) == 4
    for block, done in zip(blocks, (usual, gradients, usual, ragged), strict=True):
        printed = " ".join(number.sub("#", done).split())
        assert " ".join(number.sub("#", block).split()) in printed
    for exact in ("line 41 (first in line 32)", "655,360", "acc is wrong from row 79 on; m"):
        assert exact in page
        assert exact in usual
    assert "line 46: load outside of V (2, 250, 64): 384 of 4096 lanes" in ragged


def test_the_lesson_s_kernel_becomes_right(tmp_path):
    """Each of its fixes, at the lines that it names, and each of its quoted answers."""
    page = (ROOT / "docs/lessons/your_own_kernel.md").read_text(encoding="utf-8")
    quotes = re.findall(r"^```text\n(.*?)^```", page, re.S | re.M)
    for name in ("homework.py", "flash_attention.py"):
        (tmp_path / name).write_text((ROOT / "examples/triton" / name).read_text(encoding="utf-8"))
    path = tmp_path / "homework.py"
    lines = path.read_text(encoding="utf-8").splitlines()

    def answer(*words):
        path.write_text("\n".join(lines), encoding="utf-8")
        return " ".join(checked(f"{path}:attention", "--causal", *words).split())

    assert " ".join(quotes[0].split()) in answer()
    assert "acc = acc + tl.dot(p, v)" in lines[46]
    lines[46] = "        acc = alpha[:, None] * acc + tl.dot(p, v)"
    assert "O right" in answer()
    assert " ".join(quotes[1].split()) in answer()
    lines[40:42] = [""] * 2
    assert "load K 327,680 327,680" in answer()
    ragged = answer("-n", 250)
    assert "goes past its head's last row, into the next head" in ragged
    assert "O WRONG" in ragged
    lines[45] = lines[45].replace("d[None, :])", "d[None, :], mask=cols[:, None] < n, other=0.0)")
    assert "O right" in answer("-n", 250)
    assert "every lane that is not masked off accesses an element of its tensor" in answer(
        "-n", 250
    )


def test_a_correct_file_from_forward_to_backward(tmp_path):
    for function in ("forward", "backward"):
        done = checked(f"{FLASH}:{function}", "--causal", "-n", 96, "-d", 16, "--out", tmp_path)
        assert "WRONG" not in done
        assert " right (error " in done
        assert len(done.splitlines()) <= 32
    assert len(list(tmp_path.glob("*.html"))) == len(list(tmp_path.glob("*.png"))) == 2


def test_other_sizes_types_and_formats():
    done = checked(f"{FLASH}:forward", "-n", 80, "-d", 32, "-h", 4, "-b", 2, "--dtype", "bfloat16")
    assert "2 x 4 heads, 80 x 80, d=32, bfloat16" in done
    assert "WRONG" not in done
    done = checked(f"{FLASH}:forward", "-n", 64, "-d", 16, "--set", "block_q=16", "--json")
    assert '"needed B"' in done


def test_a_file_with_its_own_reference(tmp_path):
    path = tmp_path / "mine.py"
    text = (ROOT / "examples/triton/softmax.py").read_text(encoding="utf-8")
    path.write_text(
        text + "\n\ndef reference(loaded):\n    import numpy as np\n"
        "    e = np.exp(loaded['x_ptr'])\n    return e / e.sum(axis=1, keepdims=True)\n"
    )

    done = checked(f"{path}:softmax", "--set", "x=32x100", "--reference", "reference")

    assert "y_ptr right" in done
    assert "loaded twice by every program" in done
    path.write_text(text + "\n\ndef two(x, y):\n    return x\n")
    done = " ".join(checked(f"{path}:softmax", "--set", "x=32x100", "--reference", "two").split())
    assert "missing 1 required positional argument: 'y'; two gets a dict of the kernel's" in done
    said = refused("kernel", f"{path}:softmax", "--set", "x=9000000x9000000")
    assert "GB of memory" in said
    path.write_bytes(b"\0")
    assert f"{path}: SyntaxError" in refused("kernel", f"{path}:softmax")
    path.write_text("raise SystemExit(3)\n")
    for target in (path, f"{path}:softmax"):
        assert "line 1, `raise SystemExit(3)`: SystemExit: 3" in refused("kernel", target)


GATHER = """
import triton
import triton.language as tl

@triton.jit
def gather(x_ptr, at_ptr, y_ptr, d: tl.constexpr):
    row, column = tl.load(at_ptr + tl.program_id(0)), tl.arange(0, d)
    tl.store(y_ptr + tl.program_id(0) * d + column, tl.load(x_ptr + row * d + column))

def rows(x, at):
    import numpy as np
    y = np.zeros((len(at), x.shape[1]), x.dtype)
    gather[(len(at),)](x, at, y, x.shape[1])

def reference(loaded):
    assert loaded["at_ptr"].dtype == "int64"
    return loaded["x_ptr"][[0, 7, 3]]
"""


def test_an_array_of_numbers_is_set(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GATHER)
    words = ["--set", "x=8x16", "--set", "at=int64:0,7,3", "--reference", "reference"]

    assert "y_ptr right" in checked(f"{path}:rows", *words)


def test_a_set_scale_and_mask_are_those_of_the_right_results(tmp_path):
    text = FLASH.read_text(encoding="utf-8").replace("n, d**-0.5, causal", "n, scale, causal")
    path = tmp_path / "mine.py"
    path.write_text(text.replace("causal=False, block_q", "causal=False, scale=1, block_q"))

    done = checked(f"{path}:forward", "-n", 64, "--set", "scale=0.3", "--set", "causal=True")

    assert "causal; " in done
    assert "O right" in done


PROGRAM = """
import numpy as np
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.autotune([triton.Config({"B": 16}), triton.Config({"B": 32})], key=["n"])
@triton.jit
def scale(x_ptr, y_ptr, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


if __name__ == "__main__":
    x = np.arange(100, dtype=np.float32)
    y = np.zeros_like(x)
    scale[lambda meta: (triton.cdiv(100, meta["B"]),)](x, y, 100)
    assert (y == 2 * x).all()
    ms = triton.testing.do_bench(lambda: scale[(7,)](x, y, 100))
    print("milliseconds", ms)
    raise SystemExit(0)
"""


def test_a_program_that_wants_a_gpu_runs(tmp_path):
    """It asks the driver for a device, tunes a kernel, and measures its time."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    before = dict(vars(triton.runtime.driver))

    done = checked(path)

    assert "scale: " in done
    assert "milliseconds nan" in done
    assert re.search(r"load x_ptr +400 ", done)
    assert path.read_text() == PROGRAM
    assert dict(vars(triton.runtime.driver)) == before


def asked_and_failed():
    with standing_in():
        assert triton.runtime.driver.active.get_current_target().backend == "cuda"
        raise KeyError("on purpose")


def test_finders_that_an_import_adds_stay():
    finder = object()
    with standing_in():
        sys.meta_path.append(finder)
    assert sys.meta_path.pop() is finder


def test_the_driver_is_put_back_after_an_error():
    before = dict(vars(triton.runtime.driver))
    with pytest.raises(KeyError, match="on purpose"):
        asked_and_failed()
    assert dict(vars(triton.runtime.driver)) == before


def test_torch_tensors_on_a_gpu_stay_on_the_cpu(tmp_path):
    """In a new process, in which nothing has imported torch before the program."""
    pytest.importorskip("torch")
    path = tmp_path / "program.py"
    numbers = "torch.arange(100, dtype=torch.float32, device='cuda').to('cuda')"
    text = PROGRAM.replace("np.arange(100, dtype=np.float32)", numbers)
    text = text.replace("np.zeros_like(x)", "torch.empty_like(x).cuda()")
    asked = "assert torch.cuda.get_device_capability() == (8, 0)\n"
    path.write_text(f"import torch\n{asked}{text}")

    command = [sys.executable, "-m", "flashsim", "kernel", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "milliseconds nan" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py:f"], "the file 'nowhere.py' does not exist"),
        ([f"{ROOT}/README.md"], "README.md' is not a Python file; pass FILE.py:function"),
        ([f"{FLASH}:backwards"], "has no 'backwards'; choose from"),
        (
            [f"{FLASH}:attention_forward"],
            "is itself a kernel; name a function that launches the kernel",
        ),
        ([f"{ROOT}/examples/triton/softmax.py:softmax"], "set its value with --set x=VALUE"),
        ([f"{FLASH}:forward", "--set", "blocks=3"], "the parameter 'blocks'"),
        ([f"{FLASH}:forward", "--set", "blocks"], "must have the form NAME=VALUE, got 'blocks'"),
        ([f"{FLASH}:forward", "--set", "scale=int32:1,.5"], "such as int32:0,100,256"),
        ([f"{FLASH}:forward", "-n", "64", "--config", "1"], "has no @triton.autotune"),
        ([FLASH, "--causal"], "runs as a program, because no function is named, but --causal"),
        ([f"{FLASH}:forward", "--ndim", "5"], "ndim must be 2, 3 or 4, got 5"),
        ([f"{FLASH}:forward", "--seed", "-1"], "seed must be at least 0, got -1"),
        ([f"{FLASH}:forward", "--out", __file__], "is a file, not a folder"),
        ([f"{FLASH}:forward", "--layout", "bnhd"], "--layout orders four axes, but q has 3"),
        ([f"{FLASH}:forward", "--name", "zz=K", "-n", "64"], "names= contains 'zz'"),
    ],
)
def test_errors_are_one_line(words, said):
    done = invoke("kernel", *words)

    assert done.exit_code == 2
    assert said in done.output, done.output
    assert "Traceback" not in done.output


ADDS_TO_NOTHING = """import numpy as np
import triton
import triton.language as tl

@triton.jit
def adds(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(y_ptr + at) + tl.load(x_ptr + at))

def launch(x):
    y = np.empty_like(x)
    adds[(x.size // 1024,)](x, y, BLOCK=1024)
    return y

def same(loaded):
    return loaded["x_ptr"]
"""


def test_memory_of_numpy_empty_is_nan(tmp_path):
    """The system's memory is often zero, with which a kernel that adds to it would look right."""
    path = tmp_path / "adds.py"
    path.write_text(ADDS_TO_NOTHING)
    assert "y_ptr WRONG (error nan" in checked(
        f"{path}:launch", "--set", "x=512x1024", "--reference", "same"
    )
