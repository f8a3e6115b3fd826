"""`flashsim.torch.ring_attention` over NCCL, on all GPUs of this host if there are several."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import ring_nccl  # noqa: E402

from flashsim.distributed import count  # noqa: E402
from flashsim.problem.problem import Problem  # noqa: E402

RANKS = min(4, torch.cuda.device_count() if torch.cuda.is_available() else 0)
pytestmark = [
    pytest.mark.promise("bridges equal their library"),
    pytest.mark.gpu,
    pytest.mark.skipif(RANKS not in (2, 4), reason="needs two or four NVIDIA GPUs"),
]
EPS = 2.0**-8  # bfloat16's


def launch(folder, case, limit):
    """Every rank's exit status, what it wrote (None: nothing), its standard error; the seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    script, start = Path(ring_nccl.__file__), time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), case],
            env={**os.environ, **where, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=limit)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    took = time.monotonic() - start
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    found = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return [process.returncode for process in processes], found, errors, took


def test_out_and_gradients_by_the_2_x_rule_and_bytes_as_counted(tmp_path):
    codes, found, errors, _ = launch(tmp_path, "alike", 100)
    assert codes == [0] * RANKS, errors
    for rank, rows in enumerate(found):
        for scheme, causal, name, *figures in rows:
            if name != "sent":
                off, one, plain, largest = figures
                assert off <= 2 * max(one, plain) + EPS * largest, (rank, scheme, causal, name)
                continue
            sizes = {"head_dim": ring_nccl.D, "heads": ring_nccl.HEADS, "dtype": "bfloat16"}
            problem = Problem(ring_nccl.N, causal=causal, **sizes)
            for direction, sent in zip(("forward", "backward"), figures, strict=True):
                counted = count(
                    problem, ranks=RANKS, scheme=scheme, direction=direction,
                    ulysses=2 if scheme == "usp" else None,
                )  # fmt: skip
                expected = {name: counted.link_bytes(name, rank) for name in counted.sent}
                assert sent == {name: x for name, x in expected.items() if x}, (rank, scheme)


@pytest.mark.parametrize("case", ["stays away", "dies", "dies, waited for"])
def test_a_rank_that_is_gone_ends_every_other_with_an_error_in_time(tmp_path, case):
    """By a `RankError`; who waits for the GPU just then, by NCCL's watchdog, which says why."""
    codes, found, errors, took = launch(tmp_path, case, 45)
    print(f"{case}: {took:.1f} s, exit {codes}, {found}")
    for rank, text in enumerate(errors):
        print(
            rank, *[line for line in text.splitlines() if "atchdog" in line or "Error" in line][:4]
        )
    for rank in range(RANKS - 1):
        assert codes[rank] != 0
        if found[rank] is None:
            assert "Watchdog caught collective operation timeout" in errors[rank], errors[rank][
                -2000:
            ]
            continue
        text, seconds = found[rank]
        assert text.startswith(f"RankError: rank {rank} of {RANKS}: "), text
        assert "another rank has ended, or has not reached this point" in text
        assert seconds < 3 * ring_nccl.PATIENCE
