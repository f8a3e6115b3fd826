"""`flashsim.torch.ring_attention` on four processes, by gloo."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

import ring_ranks  # noqa: E402

import flashsim.torch  # noqa: E402
from flashsim.distributed import Group, count  # noqa: E402
from flashsim.errors import (  # noqa: E402
    DTypeError,
    RankError,
    ShapeError,
    UnknownArgumentError,
)
from flashsim.problem import oracle  # noqa: E402
from flashsim.problem.problem import Problem  # noqa: E402
from flashsim.torch.combining import merge_into  # noqa: E402
from flashsim.torch.process_group import Member  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")

RANKS = 4
NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of four processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(ring_ranks.__file__)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(RANKS), str(folder)],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0, 0, 0, 3], errors  # the last one dies in the last case
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def together(ranks, case):
    """Out, dq, dk and dv of the whole sequence; the bytes that all ranks sent, each way."""
    scheme, n, causal, dtype, kv_heads = case
    sizes = {"head_dim": ring_ranks.D, "heads": ring_ranks.HEADS, "kv_heads": kv_heads}
    kind = str(dtype).removeprefix("torch.")
    problem = Problem(ring_ranks.N, **sizes, dtype=kind, causal=causal)
    group = Group(problem, n, scheme, 2 if scheme == "usp" else None)
    found = [[] for _ in range(4)]
    for tensors in zip(*(rank[case][0] for rank in ranks[:n]), strict=True):
        whole = torch.empty((1, tensors[0].shape[1], ring_ranks.N, ring_ranks.D), dtype=dtype)
        for number, x in enumerate(tensors):
            whole[:, :, group.rows(number)] = x
        found.append(whole)
    return group, found[4:], [[rank[case][way] for rank in ranks[:n]] for way in (1, 2)]


@pytest.mark.parametrize("case", ring_ranks.CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_out_and_gradients_by_the_2_x_rule(ranks, case):
    group, found, _ = together(ranks, case)
    p, given = group.problem, ring_ranks.tensors(case[4], case[3])
    q, k, v, dout = (x.double().numpy() for x in given)
    one = flashsim.run(*given[:3], causal=p.causal)
    gradients = one.backward(given[3])
    alone = dict(zip(NAMES, (one.out, gradients.dq, gradients.dk, gradients.dv), strict=True))
    exact, plain = (
        {"out": oracle.attention(q, k, v, p, dtype=dtype)[0]}
        | oracle.gradients(q, k, v, dout, p, dtype=dtype)
        for dtype in ("float64", p.dtype)
    )
    for name, x in zip(NAMES, found, strict=True):
        off = lambda y, name=name: np.abs(np.asarray(y, "f8") - exact[name]).max()  # noqa: E731
        budget = 2 * max(off(alone[name].double()), off(plain[name]))
        budget += torch.finfo(case[3]).eps * np.abs(exact[name]).max()
        assert off(x.double()) <= budget, name


@pytest.mark.parametrize("case", ring_ranks.CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_bytes_sent_are_those_counted(ranks, case):
    group, _, sent = together(ranks, case)
    for direction, by_rank in zip(("forward", "backward"), sent, strict=True):
        counted = count(
            group.problem, ranks=group.ranks, scheme=group.scheme, direction=direction,
            ulysses=group.ulysses if group.scheme == "usp" else None,
        )  # fmt: skip
        for rank, tensors in enumerate(by_rank):
            assert tensors == {name: counted.link_bytes(name, rank) for name in counted.sent}


REFUSED = {
    "rows": "RankError: all ranks must get the same rows, got 8 on ranks 0, 2, 3, 4 on rank 1",
    "types": "the same dtype, got float32 on ranks 0, 2, 3, float16 on rank 1",
    "scheme": "the same scheme, got ring on ranks 0, 2, 3, striped on rank 1",
    "mask": "the same causal, got no on ranks 0, 2, 3, yes on rank 1",
    "one alone": "RankError: rank 1 failed; read the error message that rank 1 printed",
    "not divisible": "ShapeError: scheme 'zigzag' over 4 ranks needs a sequence length divisible",
    "heads": "ShapeError: the number of ranks that exchange heads, 4, must divide heads=3",
    "engine": "RankError: rank 1 failed; read the error message that rank 1 printed",
    "meta": "DTypeError: tensors on the meta device have no numbers to send",
    "no tensor": "DTypeError: q must be a torch.Tensor, got int",
}
ALONE = {
    "one alone": "ShapeError: q must be (batch, heads, rows of this rank, head_dim)",
    "engine": "OptionError: unknown backend 'c'; choose from simulator",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_an_error_on_every_rank(ranks, what):
    texts = [rank["refusals"][what][0] for rank in ranks]
    if what in ALONE:
        assert ALONE[what] in texts.pop(1)
    assert all(REFUSED[what] in text for text in texts), texts


@pytest.mark.parametrize("what", ["silence", "death"])
def test_a_rank_that_is_gone_is_an_error_on_every_other_in_time(ranks, what):
    for rank in ranks[:3]:
        text, took = rank[what]
        assert text.startswith("RankError: rank "), text
        assert "another rank has ended, or has not reached this point" in text
        assert took < 4 * ring_ranks.PATIENCE


# -- without other processes ----------------------------------------------------------------------


def test_without_a_process_group_it_says_what_to_do():
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(RankError, match="init_process_group"):
        flashsim.torch.ring_attention(x, x, x)
    with pytest.raises(UnknownArgumentError, match="did you mean 'scheme'"):
        flashsim.torch.ring_attention(x, x, x, schema="ring")
    with pytest.raises(RankError, match="init_process_group"):
        flashsim.torch.shard(x)


def test_one_rank_is_plain_attention():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        q, k, v = (x.requires_grad_() for x in ring_ranks.tensors(2, torch.float64)[:3])
        how = {"causal": True, "backend": "simulator"}
        for scheme in ("ring", "zigzag", "striped", "ulysses", "usp"):
            out = flashsim.torch.ring_attention(q, k, v, scheme=scheme, **how)
            torch.testing.assert_close(out, flashsim.torch.attention(q, k, v, **how))
        assert torch.autograd.gradcheck(
            lambda *x: flashsim.torch.ring_attention(*x, **how), [x[:, :, :6] for x in (q, k, v)]
        )
        for familiar in (False, True):  # the second time the answer may be heard later
            question = Member().ask({"something": 7})
            assert question.familiar == familiar
            question.settle()
        with pytest.raises(ShapeError, match="pass it as ulysses="):
            flashsim.torch.shard(q, scheme="usp")
        with pytest.raises(ShapeError, match=r"dim= must be an axis of x, .*, got 7"):
            flashsim.torch.shard(q, dim=7)
        with pytest.raises(DTypeError, match=r"x must be a torch.Tensor, got ndarray"):
            flashsim.torch.shard(q.detach().numpy())
        with pytest.raises(DTypeError, match="deterministic must be True or False, got 'x'"):
            flashsim.torch.ring_attention(q, k, v, deterministic="x")
        twice = torch.compile(
            lambda *x: 2 * flashsim.torch.ring_attention(*x, **how), backend="aot_eager"
        )
        torch.testing.assert_close(twice(*(x.detach() for x in (q, k, v))), 2 * out)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = flashsim.torch.ring_attention(q.float(), k.float(), v.float(), **how)
        assert narrow.dtype == torch.bfloat16
    finally:
        torch.distributed.destroy_process_group()


def test_merging_is_that_of_the_library_and_takes_rows_without_keys():
    torch.manual_seed(0)
    out, part = torch.randn(2, 1, 2, 5, 4)
    lse, part_lse = torch.randn(2, 1, 2, 5)
    lse[0, 0, 0] = part_lse[0, 0, 0] = -torch.inf
    out[0, 0, 0] = part[0, 0, 0] = 0
    part_lse[0, 0, 1] = -torch.inf
    expected = flashsim.merge(*(x.numpy() for x in (out, lse, part, part_lse)))
    whole, whole_lse = torch.cat([out, out], 2), torch.cat([lse, lse], 2)
    merge_into(whole[:, :, 5:], whole_lse[:, :, 5:], part, part_lse)
    for x, y, before in zip((whole, whole_lse), expected, (out, lse), strict=True):
        torch.testing.assert_close(x[:, :, 5:], torch.from_numpy(y))
        torch.testing.assert_close(x[:, :, :5], before)
