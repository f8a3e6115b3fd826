"""The ranges by which Nsight Compute labels a program's attention kernels, and their calls."""

import json
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

from flashsim import Problem  # noqa: E402
from flashsim.torch import xray  # noqa: E402
from flashsim.torch.watch import in_ranges  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")


def test_each_pass_of_each_call_runs_in_a_range_of_its_own():
    log = []

    @contextmanager
    def opened(name):
        log.append(("begin", name))
        yield
        log.append(("end", name))

    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    with in_ranges(opened) as ranges:
        first, second = sdpa(q, k, v), sdpa(q, k, v, is_causal=True)
        log.append(("between", ""))
        (first.sum() + second.sum()).backward()
    names = [name for what, name in log if what == "begin"]
    between = log.index(("between", ""))
    forward = [name for what, name in log[:between] if what == "begin"]
    assert len(forward) == 2
    assert set(names[2:]) == {f"{name} backward" for name in forward}
    assert log.count(("begin", names[2])) == log.count(("end", names[2]))
    calls = {name: (call.pattern.causal, way) for name, (call, way) in ranges.calls.items()}
    assert calls[forward[1]] == (True, "forward")
    assert calls[f"{forward[0]} backward"] == (False, "backward")


def test_a_call_is_described_as_a_problem(monkeypatch):
    q = torch.randn(1, 4, 8, 4)
    k = torch.randn(1, 2, 8, 4)
    with in_ranges(torch.profiler.record_function) as ranges:
        sdpa(q, k, k, is_causal=True, enable_gqa=True)
        sdpa(q, q, q, attn_mask=torch.rand(8, 8) > 0.5)
    plain, masked = dict.fromkeys(call for call, _ in ranges.calls.values())
    about = json.loads(json.dumps(xray.described(plain)))
    assert Problem(**about["problem"]) == plain.problem
    assert xray.described(masked)["note"]


def test_without_a_gpu_the_child_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        return
    assert xray.main(str(tmp_path / "calls.json"), "program.py") == 1
    assert "no GPU" in capsys.readouterr().err
