"""A small slice of `make outside`, and the command that counts it."""

import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("expecttest")

from outside import __main__ as command  # noqa: E402
from outside import (  # noqa: E402
    cs336,
    flash_attention_files,
    flash_attention_functions,
    functions_judged,
    jax_nn,
    torch_flex,
    torch_sdpa,
)
from outside.cases import NotApplicable, Test, chosen, one_of_each, product, tried  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")


def slice_of(suite, name, /, **values):
    """The points of a test that have these values, of which the first fitting one is run."""
    (test,) = (test for test in suite.tests("cpu", whole=False) if test.name == name)
    points = [p for p in test.points if values.items() <= p.items() and not test.unfit(p)]
    assert points
    return tried(suite.TITLE, Test(name, test.run, points[:1]))


@pytest.mark.parametrize(
    ("suite", "name", "values"),
    [
        (cs336, "flash_forward_pass_pytorch", {}),
        (cs336, "flash_backward_pytorch", {}),
        (torch_sdpa, "scaled_dot_product_attention: values and gradients", {"number": 8}),
        (torch_sdpa, "scaled_dot_product_attention: not contiguous", {"number": 9}),
        (torch_sdpa, "scaled_dot_product_attention: gradcheck", {"number": 12}),
        (jax_nn, "testDotProductAttention", {"groups": 2, "vmap": True}),
        (jax_nn, "testDotProductAttentionMask", {"mode": ("causal", "padding")}),
        (jax_nn, "testDotProductAttentionBiasGradient", {"batch": 1}),
        (flash_attention_functions, "test_score_mod", {"name": "many_buffers", "n": (113, 128)}),
        (flash_attention_functions, "test_mask_mod", {"name": "nothing_for_some", "n": (113, 203)}),
        (flash_attention_functions, "test_block_sparsity", {"name": "own_ends", "n": (100, 100)}),
        (torch_flex, "test_flex_attention", {"name": "silu_on_score", "n": (129, 257)}),
        (torch_flex, "test_flex_decoding", {"name": "fully_masked_out_rows", "n": (7, 200)}),
        (torch_flex, "test_block_mask_non_divisible", {"n": (130, 70)}),
        (torch_flex, "test_captured_score_mod_gradcheck", {"name": "weird_bias"}),
        (torch_flex, "test_empty_sequence", {"n": (5, 0)}),
    ],
)
def test_a_point_of_each_test_passes(suite, name, values):
    result = slice_of(suite, name, **values)
    assert result.failures == []
    assert result.passed == 1, result.unfit


def test_a_wrong_result_would_fail(monkeypatch):
    real = functions_judged.flex_attention
    wrong = lambda q, k, v, score, mask, **how: real(q, k, v, None, mask, **how)  # noqa: E731
    monkeypatch.setattr(functions_judged, "flex_attention", wrong)
    result = slice_of(flash_attention_functions, "test_score_mod", name="times_two", n=(113, 128))
    assert [text.partition("AssertionError: ")[2][:3] for text in result.failures] == ["LSE"]


def one_test():
    def run(n, way):
        if way == "other":
            raise NotApplicable("it is another's")
        if n == 2:
            raise AssertionError("two")

    points = product(n=(1, 2, 3), way=("own", "other", "never"))
    unfit = lambda point: "never" if point["way"] == "never" else ""  # noqa: E731
    return Test("ways", run, points, unfit, one_of_each("n", "way"))


def test_what_was_tried_is_counted_and_said():
    result = tried("S", one_test())
    assert (result.passed, result.left_out) == (2, 0)
    assert result.unfit == {"never": 3, "it is another's": 3}
    assert result.failures == ["n 2, way own: AssertionError: two"]
    one_each = tried("S", Test("ways", lambda **_: None, product(n=(1, 2), m=(1, 2, 3)),
                               chosen=one_of_each("n")))  # fmt: skip
    assert (one_each.passed, one_each.left_out) == (2, 4)


def test_the_command_prints_writes_and_fails(monkeypatch, tmp_path, capsys):
    class Suite:
        TITLE = "S"
        tests = staticmethod(lambda device, whole: [one_test()])

    monkeypatch.setitem(sys.modules, "outside.one", Suite)
    monkeypatch.setattr(command, "SUITES", ("one",))
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- cpu: written by make outside -->\nold\n<!-- end of cpu -->\nz\n")
    assert command.main(["--page", str(page)]) == 1
    said = capsys.readouterr()
    assert "FAILED ways: n 2, way own" in said.err
    assert "not applicable: S: 3: never" in said.out
    text = page.read_text()
    assert "| S | ways | 2 | 1 | 6 | 0 |" in text
    assert "- S: 3 because it is another's" in text
    assert f"torch {torch.__version__}" in text
    assert text.startswith("a\n<!-- cpu")
    assert text.endswith("<!-- end of cpu -->\nz\n")
    assert "old" not in text
    with pytest.raises(SystemExit, match="no lines '<!-- cuda"):
        command.main(["--page", str(page), "--gpu"])
    with pytest.raises(SystemExit):
        command.main(["two"])
    assert "no suite two" in capsys.readouterr().err


THEIRS = {
    flash_attention_files.FA2: """
import pytest
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.bert_padding import mark
from flash_attn.layers.rotary import apply_rotary_emb

@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 4), (5, 3)])
@pytest.mark.parametrize("d", [16, 32, 33])
def test_output(seqlen_q, seqlen_k, d, dropout_p, alibi):
    import torch
    if d == 33:
        pytest.skip("odd")
    q, k = torch.randn(2, seqlen_q, 2, d), torch.randn(2, seqlen_k, 2, d)
    global device
    device = "cuda"
    slopes = torch.rand(2) if alibi else None
    out = flash_attn_func(q, k, k, dropout_p, causal=True, alibi_slopes=slopes)
    assert out.shape == q.shape
    assert seqlen_q == 1, "another number"
""",
    flash_attention_files.FA3: """
from flash_attn_interface import flash_attn_combine
from padding import mark
from test_util import mark

def test_once():
    assert flash_attn_combine.__module__ == "flashsim.torch.flash_attn"

def test_flash3_bw_compatibility():
    raise AssertionError
""",
    **dict.fromkeys(flash_attention_files.FILES[2:], "mark = 1\n"),
    next(iter(flash_attention_files.CUTE)): """
import pytest
from flash_attn.cute import flash_attn_varlen_func
from flash_attn.cute.cache_utils import JITCache
from flash_attn.cute.interface import _flash_attn_fwd, flash_attn_func
from flash_attn.cute.testing import mark

@pytest.mark.parametrize("sink_dtype", ["a", "b"])
def test_sinks(sink_dtype):
    import torch
    x = torch.randn(1, 4, 2, 16)
    assert flash_attn_func(x, x, x, learnable_sink=torch.zeros(2))[1].shape == (1, 2, 4)
    if sink_dtype == "b":
        pytest.xfail("not yet")

def test_private():
    _flash_attn_fwd(1, 2)

def test_cache(monkeypatch):
    raise AssertionError

@pytest.mark.skipif(True, reason="other GPUs")
def test_other():
    raise AssertionError
""",
}


def test_files_of_flash_attention_run_on_the_interfaces(tmp_path, monkeypatch):
    """Parametrized functions are points; what is not ours to do is counted with its reason.

    On a CPU one file runs, with its device replaced and without the larger points.
    """
    for name, text in THEIRS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("FLASH_ATTENTION", str(tmp_path))
    found = {x.name: tried("S", x) for x in flash_attention_files.tests("cuda", whole=True)}
    output = found["FA2 output"]
    assert (output.passed, len(output.failures)) == (4, 4)
    assert all("another number" in text for text in output.failures)
    assert output.unfit == {"flashsim has no dropout": 12, "the test skips it: odd": 4}
    assert found["CuTe sinks"].passed == 1
    reasons = {
        name: [*found[f"CuTe {name}"].unfit] for name in ("sinks", "private", "cache", "other")
    }
    assert reasons == {
        "sinks": ["the test expects a failure: not yet"],
        "private": ["it calls a private function of flash_attn.cute"],
        "cache": ["it replaces parts of the package itself (monkeypatch)"],
        "other": ["the test skips this GPU: other GPUs"],
    }
    assert found["FA3 once"].passed == 1
    assert sum(found["FA3 flash3_bw_compatibility"].unfit.values()) == 1
    few = {x.name: tried("S", x) for x in flash_attention_files.tests("cuda", whole=False)}
    assert few["FA2 output"].left_out > 0
    monkeypatch.setattr(flash_attention_files, "MOST", 4)
    (on_cpu,) = flash_attention_files.tests("cpu", whole=False)
    assert {point["seqlen_q"] for point in chosen("S", on_cpu)[1]} == {1}
    tried("S", on_cpu)
    assert on_cpu.run.args[0].__globals__["device"] == "cpu"
    assert "flash_attn" not in sys.modules


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_rotation_that_they_are_given_is_the_one_that_is_documented(interleaved):
    x, angle = torch.randn(1, 3, 2, 10), torch.rand(9, 4)
    got = flash_attention_files.turned(x, angle.cos(), angle.sin(), interleaved, seqlen_offsets=5)
    for i in range(3):
        for pair in range(4):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
            c, s = angle[5 + i, pair].cos(), angle[5 + i, pair].sin()
            torch.testing.assert_close(got[0, i, :, a], x[0, i, :, a] * c - x[0, i, :, b] * s)
            torch.testing.assert_close(got[0, i, :, b], x[0, i, :, a] * s + x[0, i, :, b] * c)
    assert torch.equal(got[..., 8:], x[..., 8:])
