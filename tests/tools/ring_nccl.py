"""Run one rank of `flashsim.torch.ring_attention` over NCCL: torchrun ... ring_nccl.py FOLDER CASE

CASE "alike" compares out and gradients of every scheme with one GPU's, and counts the bytes sent.
The other cases test the other ranks when the last rank fails. It "stays away"; or it "dies" in the
middle of a pass, and the others go on to the next pass; or it "dies, waited for": the others then
wait for their GPU.
Every rank writes its results to FOLDER/RANK.json, which `tests/gpu/test_ring_nccl.py` judges.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
# By default NCCL's watchdog has a minute to dump what the ranks did before it ends the process.
os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")

import torch
import torch.distributed as dist
from ring_ranks import die_in_a_pass

import flashsim.torch
from flashsim.torch import count_sent, ring_attention, shard

#: Seconds after which a rank that does not answer is given up.
PATIENCE = 6.0
N, HEADS, D = 2048, 8, 128
SCHEMES = ("ring", "zigzag", "striped", "ulysses", "usp")


def plain(q, k, v, dout, dtype, causal):
    """Return out and gradients by torch's operators in `dtype`."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    s = q @ k.mT * D**-0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.softmax(s, -1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(dtype))]


def alike():
    """Return each tensor's error, by scheme and mask, and the bytes sent."""
    found = []
    torch.manual_seed(0)
    sizes = {"device": "cuda", "dtype": torch.bfloat16}
    given = [torch.randn((1, HEADS, N, D), **sizes) for _ in range(4)]
    for causal in (True, False):
        exact = plain(*given, torch.float64, causal)
        rough = plain(*given, torch.bfloat16, causal)
        whole = [x.detach().requires_grad_() for x in given[:3]]
        out = flashsim.torch.attention(*whole, causal=causal)
        one = [out.detach(), *torch.autograd.grad(out, whole, given[3])]
        for scheme in SCHEMES:
            how = {"scheme": scheme, "ulysses": 2 if scheme == "usp" else None}
            mine = [shard(x, **how).requires_grad_() for x in given]
            with count_sent() as forward:
                out = ring_attention(*mine[:3], causal=causal, **how)
            with count_sent() as backward:
                made = [out.detach(), *torch.autograd.grad(out, mine[:3], mine[3].detach())]
            for name, x, e, o, p in zip(
                ("out", "dq", "dk", "dv"), made, exact, one, rough, strict=True
            ):
                e, o, p = (shard(y, **how).double() for y in (e, o, p))
                off = [(y.double() - e).abs().max().item() for y in (x, o, p)]
                found.append([scheme, causal, name, *off, e.abs().max().item()])
            found.append([scheme, causal, "sent", dict(forward), dict(backward)])
    return found


def goes(case, rank, ranks):
    """Let the last rank stay away or die; return the others' error, and the seconds until it."""
    x = torch.zeros((1, HEADS, N, D), device="cuda", dtype=torch.bfloat16)
    for _ in range(2):  # compiles, agrees and connects
        ring_attention(x, x, x)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == ranks - 1:
        if case == "stays away":
            time.sleep(PATIENCE + 3)
            os._exit(0)
        die_in_a_pass()
    start = time.monotonic()
    try:
        for _ in range(3):
            ring_attention(x, x, x)
            if case == "dies, waited for":
                torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", time.monotonic() - start


def main() -> None:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    patience = timedelta(seconds=60 if case == "alike" else PATIENCE)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=patience)
    found = alike() if case == "alike" else goes(case, rank, ranks)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    print(f"rank {rank}: {found if case != 'alike' else 'done'}", flush=True)
    sys.stdout.flush()
    os._exit(0 if case == "alike" else 1)  # the teardown would wait for the dead rank


if __name__ == "__main__":
    main()
