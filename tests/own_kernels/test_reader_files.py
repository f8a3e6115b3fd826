"""`flashsim kernel` on files as readers write them, and on files that fail."""

import re

import pytest

pytest.importorskip("triton")

import reader_files as files
from typer.testing import CliRunner

from flashsim import Problem, Tiling, count
from flashsim.cli.app import app

pytestmark = pytest.mark.promise("command line equals library")


@pytest.fixture
def answer(tmp_path):
    """A function: the text of a file, and words, give what the command prints."""

    def run(text, function, *words, code=None):
        path = tmp_path / "mine.py"
        path.write_text(text, encoding="utf-8")
        target = f"{path}:{function}" if function else str(path)
        done = CliRunner().invoke(app, ["kernel", target, *map(str, words)])
        assert done.exit_code == (" WRONG " in done.stdout if code is None else code), done.output
        assert "Traceback" not in done.output
        return " ".join(done.output.split())

    return run


def loads(text, tensor):
    """What is printed of loads of a tensor: bytes, bytes needed, compulsory bytes."""
    row = re.search(rf"load {tensor} +([\d,]+) +([\d,]+) +([\d,]+)", text)
    return [int(x.replace(",", "")) for x in row.groups()]


def needed(tensor, **problem):
    return count(Problem(**problem), tiling=Tiling(32, 32)).bytes("load", tensor)


def test_batch_n_heads_d_is_seen_from_the_names_of_the_axes(answer):
    """The LSE has padding behind each head's rows, which is not compared."""
    text = files.kernel() + files.BATCH_N_HEADS
    words = ["--causal", "-n", 70, "--n-kv", 90, "-d", 16]

    found = answer(text, "attention", *words)

    assert "O right" in found
    assert "L right" in found
    want = needed("K", n_q=70, n_kv=90, head_dim=16, heads=2, causal=True)
    assert loads(found, "K")[:2] == [want, want]
    text = text.replace("batch, seqlen_q, nheads, d = q.shape", "batch, seqlen_q, r, d = q.shape")
    text = text.replace("nheads", "r")
    assert "O right" in answer(text, "attention", *words, "--layout", "bnhd")
    assert "O right" not in answer(text, "attention", *words, "-n", 64, "--n-kv", 64, code=2)
    assert "unknown --layout 'nbhd'" in answer(text, "attention", "--layout", "nbhd", code=2)


def test_heads_that_are_stacked_in_one_matrix(answer):
    text = files.kernel() + files.STACKED
    for name in ("q", "k", "v", "o"):
        text = text.replace(f"{name}_ptr", f"desc_{name}")

    found = answer(text, "attention", "--causal", "-n", 64, "-d", 16, "--heads", 3)

    assert "O right" in found
    assert "L right" in found
    want = needed("V", n_q=64, head_dim=16, heads=3, causal=True)
    assert loads(found, "V")[:2] == [want, want]
    ragged = answer(text, "attention", "-n", 70, "-d", 16).replace("other=0.0", "")
    assert "O right" in ragged
    text = text.replace("mask=(keys < n_kv)[:, None], other=0.0", "").replace(", )", ")")
    assert "load of K goes past its head's last row" in answer(
        text, "attention", "-n", 70, "-d", 16
    )


def test_packed_sequences_are_seen_from_their_offsets(answer):
    text = files.kernel(offsets="cu_seqlens, ", begin=files.BEGIN) + files.PACKED

    found = answer(text, "")

    assert "O right" in found
    assert "L right" in found
    offsets = (0, 20, 20, 65, 96)
    want = needed(
        "K", n_q=96, head_dim=16, heads=2, causal=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets
    )
    assert loads(found, "K")[:2] == [want, want]
    assert "cu_seqlens that the mask" not in found
    wrong = answer(text.replace("n_kv = n_q", "n_kv = n_q - 1"), "")
    assert "O WRONG" in wrong


def test_a_tensor_m_may_hold_the_lse_in_base_2(answer):
    text = files.STACKED
    base_2 = "(m + tl.log(l)) * 1.4426950408889634"
    words = ["attention", "-n", 64, "-d", 16]

    assert "L in base 2 right" in answer(files.kernel("M", value=base_2) + text, *words)
    assert "L right" in answer(files.kernel("M") + text, *words)
    wrong = answer(files.kernel("M", value=f"2 * {base_2}") + text, *words)
    assert "L WRONG" in wrong
    wrong = answer(files.kernel("lse_ptr", value=base_2) + text, *words)
    assert "the LSE is in base 2, not in base e" in wrong


def test_a_block_pointer_has_a_type(answer):
    words = ["--set", "x=40x16", "--reference", "twice", "--dtype", "float16"]

    assert "y_ptr right" in answer(files.BLOCK_POINTERS, "launch", *words)


INSIDE = """

def launch(x):
    rows, columns = x.shape

    def inner(q):
        heads, n, d = q.shape

    return attention(*np.ones((3, 1, 2, 64, 16), np.float32))


def inner_only(q, k, v):
    def inner(q):
        heads, d = q.shape

    return attention(q, k, v)
"""


def test_axes_are_those_of_the_function_itself(answer):
    text = files.kernel() + files.STACKED + INSIDE

    assert "O right" in answer(text, "launch", "--set", "x=3x4")
    assert "O right" in answer(text, "inner_only", "-n", 64, "-d", 16)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("(i + 1) * B + n_kv", "i * B + n_kv", "the loop over keys ends before the diagonal"),
        ("in range(0, end, B)", "in range(B, end, B)", "the first key tile is left out"),
        ("d**-0.5", "heads**-0.5", "multiplied by 0.57735; the scale is 0.25"),
        ("exp(s - m_new[:, None])", "exp(s)", "an exponential of a positive number"),
    ],
)
def test_mistakes_are_named(answer, right, wrong, said):
    text = files.kernel() + files.STACKED
    words = ["attention", "--causal", "-n", 96, "-d", 16, "--heads", 3]
    assert said not in answer(text, *words)
    assert right in text

    assert said in answer(text.replace(right, wrong), *words)


def test_the_tanh_of_a_softcap_is_no_softmax_without_a_maximum(answer):
    tanh = "s = 5.0 * (2.0 / (1.0 + tl.exp(-2.0 * s / 5.0)) - 1.0)"
    place = "        s = tl.where"
    text = files.kernel() + files.STACKED
    assert place in text

    said = answer(text.replace(place, f"        {tanh}\n{place}"), "attention", "-d", 16)
    assert "exponential" not in said
    assert "O WRONG" in said  # a softcap, and the comparison is with attention without one


def test_in_16_bits_a_scale_that_is_off_by_four_percent_is_wrong(answer):
    text = files.kernel() + files.STACKED
    words = ["attention", "--causal", "-n", 96, "-d", 16, "--dtype", "bfloat16"]

    assert "O right" in answer(text, *words)
    assert "d**-0.5" in text
    assert "O WRONG" in answer(text.replace("d**-0.5", "1.04 * d**-0.5"), *words)


@pytest.mark.parametrize(
    ("change", "function", "said"),
    [
        (("heads, n, d = q.shape", "heads, n, d, e = q.shape"), "attention",
         "d, e = q.shape`: ValueError: not enough values to unpack"),
        (("import triton\n", "import tritonn\n"), "attention",
         "line 3, `import tritonn`: ModuleNotFoundError: No module named 'tritonn'"),
        (("def attention(q", "def attention)(q"), "attention", "SyntaxError: unmatched ')'"),
        (("heads, n, d = q.shape", "heads, n, d = q.shape\n    1 / 0"), "attention",
         "it was called with q (1, 2, 256, 64), k"),
        (("def attention", "raise KeyError('no')\ndef attention"), "", "KeyError: 'no'"),
        (("def attention", "def _hidden"), "attention", "has no 'attention'; choose from attend"),
    ],
)  # fmt: skip
def test_a_file_that_fails_is_told_with_its_line(answer, change, function, said):
    assert change[0] in files.KERNEL + files.STACKED

    assert said in answer((files.kernel() + files.STACKED).replace(*change), function, code=2)
