"""Compiling the CPU engine ahead of time."""

import subprocess
import sys

import pytest
from commands import rows
from unoptimised import HERE_TOO

import flashsim
from flashsim.engines.cpu import heuristics, threads
from flashsim.problem.problem import Problem


def test_a_warm_process_finds_everything_compiled():
    """Of another shape, and of the other type of 16 bits if it is multiplied likewise."""
    flashsim.warm("float16")
    halves, others = (heuristics.cpu(None, Problem(64, dtype=x)) for x in ("float16", "bfloat16"))
    for dtype in ("float16", "bfloat16") if type(halves) is type(others) else ("float16",):
        again = flashsim.warm(dtype, 32)
        assert again.compiled == ()
    assert again.folder == threads.folder()
    assert list(again.folder.glob("*.nbi"))


@pytest.mark.parametrize(
    ("direction", "walks"),
    [
        ("forward", {"forward"}),
        ("decode", {"decode"}),
        ("both", {"forward", "delta", "grad_keys"}),
        ("all", {"forward", "delta", "grad_keys", "decode"}),
    ],
)
def test_a_direction_names_what_it_compiled(direction, walks, monkeypatch):
    """Walks that were run count as compiled: most are on disk by now."""
    asked = dict.fromkeys(threads.compiled(), 0)
    real = threads.run
    monkeypatch.setattr(threads, "compiled", lambda: dict(asked))

    def run(name, *args, **options):
        asked[name] += 1
        real(name, *args, **options)

    monkeypatch.setattr(threads, "run", run)
    assert set(flashsim.warm(direction=direction).compiled) == walks


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_later_process_decodes_without_compiling(dtype):
    """One query runs on a walk of its own, which is on disk as well, for few heads and for many."""
    flashsim.warm(dtype, direction="decode")
    code = (
        f"{HERE_TOO} import numpy as np, flashsim, ml_dtypes;"
        "from flashsim.engines.cpu import threads;"
        f"x = np.ones((1, 16, 64, 64), '{dtype}');"
        "[flashsim.run(x[:, :, :1], x[:, :n], x[:, :n], backend='numba') for n in (16, 4, 2, 1)];"
        "assert not any(threads.compiled().values()), threads.compiled()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_says_seconds_and_folder():
    (row,) = rows("study warm", "--direction", "forward")
    assert isinstance(row["s"], float)  # 0.0 where this process has compiled it before
    assert (row["dtype"], row["direction"]) == ("float32", "forward")
    assert row["folder"] == str(threads.folder())


@pytest.mark.promise("failures end in words")
@pytest.mark.parametrize("folder", ["a file/below", None])
def test_where_nothing_can_be_kept_nothing_is_compiled(folder, tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    found = None if folder is None else tmp_path / folder
    monkeypatch.setattr(threads, "folder", lambda: found)
    with pytest.raises(flashsim.BackendUnavailable, match=r"cannot be cached: .*NUMBA_CACHE_DIR"):
        flashsim.warm()
