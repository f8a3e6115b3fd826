"""What Numba compiles, on disk: no folder, a full disk, damaged files cost a compilation only."""

import os
import stat

import numba
import pytest
from numba import njit
from numba.core import caching

from flashsim.engines.cpu import threads
from flashsim.l2 import compiled as cache

pytestmark = pytest.mark.promise("failures end in words")


def fresh(decorate=cache.keep):
    """The same small function as a new process would have it."""

    @decorate
    @njit(nogil=True)
    def twice(x):
        return 2 * x

    return twice


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where Numba keeps what it compiles."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    cache._once.cache_clear()
    return tmp_path


def hits(walk):
    assert walk(21) == 42
    return sum(walk.stats.cache_hits.values())


def files(folder, ending):
    (path,) = folder.rglob(f"*.{ending}")
    return path


def test_what_was_compiled_is_found_again(capsys):
    assert [hits(fresh()), hits(fresh())] == [0, 1]
    assert cache.kept(fresh())
    assert capsys.readouterr().err == ""


def test_a_process_that_optimises_does_not_load_unoptimised_code():
    walk = fresh()
    hits(walk)
    (key,) = walk._cache._cache_file._load_index()
    plain = walk._cache._index_key(walk.signatures[0], walk.targetctx.codegen())
    assert (key[-1] == "unoptimised") == (key != plain) == ("FLASHSIM_UNOPTIMISED" in os.environ)


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_files_cut_short_are_repaired(folder, ending, capsys):
    hits(fresh())
    path = files(folder, ending)
    whole = path.read_bytes()
    for length in [0, 1, 5, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        cache._once.cache_clear()
        assert hits(fresh()) == 0
        said = capsys.readouterr().err
        assert said.startswith("flashsim: compiled code in ")
        assert said.endswith("compiling again\n")
        assert hits(fresh()) == 1
    assert capsys.readouterr().err == ""


def test_a_flipped_byte_is_not_run(folder, capsys):
    hits(fresh())
    path = files(folder, "nbc")
    whole = path.read_bytes()
    for place in range(0, len(whole), 997):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        hits(fresh())  # refused, or the byte is none of the function's
        assert hits(fresh()) == 1
    assert "checksum of this cache file does not match its content" in capsys.readouterr().err


def test_an_older_entry_under_the_same_name_is_not_taken(folder):
    """A disk that was full between the two writes leaves an index that names an older file."""
    hits(fresh())
    path = files(folder, "nbc")
    old = path.read_bytes()

    @cache.keep
    @njit(nogil=True)
    def twice(x):
        return 2 * x

    twice._cache._cache_file._index_path = str(files(folder, "nbi"))
    twice._cache._cache_file._data_name_pattern = fresh()._cache._cache_file._data_name_pattern
    twice(1.5)  # another signature: its own file ...
    other = next(p for p in folder.rglob("*.nbc") if p != path)
    other.write_bytes(old)  # ... which was never written
    again = fresh()
    assert again(1.5) == 3.0


def test_a_full_disk_costs_the_cache_only(monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.os, "replace", full)
    walk = fresh()
    assert walk(21) == 42
    assert walk(1.5) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot save compiled code in" in said
    assert "No space left on device" in said
    assert "NUMBA_CACHE_DIR" in said


def test_without_a_folder_to_write_to_kernels_are_compiled_in_memory(tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(blocked / "folder"))

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    for kind in caching.CacheImpl._locator_classes:
        monkeypatch.setattr(kind, "ensure_cache_path", refuse)
    with pytest.raises(RuntimeError, match="cannot cache function"):  # what Numba says
        fresh(lambda walk: walk.enable_caching())
    walk = fresh()
    assert not cache.kept(walk)
    assert capsys.readouterr().err == ""
    assert [walk(21), walk(1.5), fresh()(21)] == [42, 3.0, 42]
    assert capsys.readouterr().err == (
        "flashsim: no folder for compiled code is writable; each process compiles it again; "
        "NUMBA_CACHE_DIR can name another folder\n"
    )
    threads._say_compiling(cache.kept(walk))
    assert capsys.readouterr().err == "flashsim: compiling the CPU kernels\n"


@pytest.mark.skipif(os.name != "posix", reason="no modes of files")
@pytest.mark.parametrize("what", ["folder", "index", "group"])
def test_what_others_can_write_is_not_loaded(folder, what, capsys):
    hits(fresh())
    path = {"folder": files(folder, "nbi").parent, "index": files(folder, "nbi")}.get(
        what, files(folder, "nbc")
    )
    mode = path.stat().st_mode
    if what == "group":
        try:
            os.chown(path, -1, os.getuid() + 1)  # a group that is not the user's own
        except PermissionError:
            pytest.skip("only root may give a file to a group that is not root's")
    path.chmod(mode | (stat.S_IWGRP if what == "group" else stat.S_IWOTH))
    walk = fresh()
    assert walk(21) == 42
    assert not cache.kept(walk)
    said = capsys.readouterr().err
    assert said.startswith(f"flashsim: other users can write to {path}, so code in it is not used;")
    assert said.count("\n") == 1
    path.chmod(mode)
    assert hits(fresh()) == 1


@pytest.mark.skipif(os.name != "posix", reason="no modes of files")
def test_a_users_own_group_may_write(folder):
    hits(fresh())
    path = files(folder, "nbi")
    if path.stat().st_gid != path.stat().st_uid:
        pytest.skip("here a user's group has another number than the user")
    path.chmod(0o664)
    assert hits(fresh()) == 1


def test_every_walk_is_kept():
    assert all(map(cache.kept, threads._KERNELS.values()))
