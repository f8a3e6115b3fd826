"""Run one rank of `flashsim.torch.ring_attention`'s tests: python ring_ranks.py RANK RANKS FOLDER

It joins the group whose store is in FOLDER, runs every case and writes the results to
FOLDER/RANK.pt. `tests/api/bridges/test_ring.py` starts the ranks and judges.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from flashsim.torch import count_sent, ring_attention, shard
from flashsim.torch.ring import execution

#: Cases: (scheme, ranks, causal, type, KV heads).
CASES = (
    ("ring", 4, True, torch.float32, 2),
    ("zigzag", 4, True, torch.bfloat16, 2),
    ("zigzag", 2, True, torch.bfloat16, 4),
    ("zigzag", 2, False, torch.float32, 4),
    ("striped", 4, True, torch.float16, 4),
    ("ulysses", 4, True, torch.bfloat16, 4),
    ("usp", 4, True, torch.bfloat16, 2),
)
N, HEADS, D = 48, 4, 16
#: Seconds after which a rank that does not answer is given up.
PATIENCE = 4.0


def tensors(kv_heads, dtype):
    """Return q, k, v and dout of the whole sequence, equal in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, N, D) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def run(scheme, group, causal, dtype, kv_heads):
    """Return this rank's rows of out, dq, dk and dv, and the bytes that it sent."""
    ulysses = 2 if scheme == "usp" else None
    how = {"group": group, "scheme": scheme, "ulysses": ulysses}
    q, k, v, dout = (shard(x, **how) for x in tensors(kv_heads, dtype))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with count_sent() as forward:
        out = ring_attention(*inputs, causal=causal, backend="simulator", **how)
    with count_sent() as backward:
        gradients = torch.autograd.grad(out, inputs, dout)
    return [out.detach(), *gradients], dict(forward), dict(backward)


def outcome(call):
    """Return the error that a call raises, as text, and the seconds until it."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", time.monotonic() - start


def refusals(rank):
    """Return the ranks' errors for inconsistent input; the group still works afterwards."""
    whole = torch.zeros(1, HEADS, 8, D)
    short, half = whole[:, :, :4], whole.to(torch.float16)

    def call(x, **how):
        return outcome(lambda: ring_attention(x, x, x, backend="simulator", **how))

    odd = rank == 1
    return {
        "rows": call(short if odd else whole),
        "types": call(half if odd else whole),
        "scheme": call(whole, scheme="striped" if odd else "ring"),
        "mask": call(whole, causal=odd),
        "one alone": call(whole[0] if odd else whole),
        "not divisible": call(whole[:, :, :7]),
        "heads": call(whole[:, :3], scheme="ulysses"),
        "engine": outcome(
            lambda: ring_attention(*(whole,) * 3, backend="c" if odd else "simulator")
        ),
        "meta": call(whole.to("meta")),
        "no tensor": outcome(lambda: ring_attention(1, whole, whole)),
    }


def die_in_a_pass():
    """Let this process end in the middle of its next pass."""
    calls, run = [], execution.run

    def dying(*args, **how):
        calls.append(1)
        if len(calls) == 2:
            os._exit(3)
        return run(*args, **how)

    execution.run = dying


def silence(rank, group):
    """Let rank 3 stay away until the others have given it up."""
    if rank == 3:
        time.sleep(PATIENCE + 1)
        return "stayed away", 0.0
    x = torch.zeros(1, HEADS, 8, D)
    return outcome(lambda: ring_attention(x, x, x, group=group, backend="simulator"))


def death(rank, group):
    """Let rank 3 die in a pass; a rank that had all it needed gets the error in the next pass."""
    if rank == 3:
        die_in_a_pass()
    x = torch.zeros(1, HEADS, 8, D)

    def twice():
        for _ in range(2):
            ring_attention(x, x, x, group=group, backend="simulator")

    return outcome(twice)


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    pairs = [dist.new_group(pair) for pair in ((0, 1), (2, 3))]
    found = {}
    for case in CASES:
        scheme, n, *rest = case
        group = pairs[rank // 2] if n == 2 else None
        found[case] = run(scheme, group, *rest)
    found["refusals"] = refusals(rank)
    impatient = timedelta(seconds=PATIENCE)
    found["silence"] = silence(rank, dist.new_group(timeout=impatient))
    dist.barrier()
    last = dist.new_group(timeout=impatient)
    torch.save(found, folder / f"{rank}.pt")  # rank 3 never gets here
    found["death"] = death(rank, last)
    torch.save(found, folder / f"{rank}.pt")
    os._exit(0)  # the teardown of gloo would wait for the dead rank


if __name__ == "__main__":
    main()
