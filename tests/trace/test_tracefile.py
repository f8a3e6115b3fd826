"""Trace files: what is saved comes back; what is no trace file, or no longer one, is refused."""

import io
import json
import os
import stat
import zipfile

import numpy as np
import pytest
from helpers import tensors
from trace_files import rewritten

import flashsim
from flashsim import BlockMask, Device, Tiling, Trace, TraceError
from flashsim.schedule.file_mask import SavedMask
from flashsim.schedule.names import TENSORS
from flashsim.trace import file as tracefile
from flashsim.trace.events import PHASES, TIMELINE

pytestmark = pytest.mark.promise("traces round-trip")

RNG = np.random.default_rng(3)
TILING = Tiling(16, 8)
MINE = Device(
    "mine", sram_bytes=50_000, sram_per_sm=60_000, tensor_flops={"float16": 1e12}, source="me"
)


def far(q, k):
    return (q - k) % 5 < 3


def grid(n_q, n_kv):
    return BlockMask(RNG.random((-(-n_q // 7), -(-n_kv // 5))) < 0.6, 7, 5)


OPTIONS = {
    "plain": {},
    "causal, half": {"causal": True, "dtype": "float16"},
    "window": {"window": (9, 2), "softcap": 7.5, "scale": 0.1},
    "packed": {"cu_seqlens_q": [0, 0, 20, 45], "cu_seqlens_k": [0, 10, 33, 51], "causal": True},
    "bias": {"bias": (4, 45, 51), "device": MINE},
    "block mask": {"block_mask": grid(45, 51)},
    "mask": {"mask": far},
    "mask, descending": {"mask": far, "causal": True, "key_order": "descending"},
    "mask and block mask": {"mask": far, "block_mask": grid(45, 51), "device": "A100"},
}


def traces(options, algorithm="flash2", backward_tiling=TILING):
    """Forward and backward traces of a small run."""
    options = {**options}
    dtype = np.dtype(options.pop("dtype", "float32"))
    shapes = {"q": (4, 45, 8), "k": (2, 51, 8), "v": (2, 51, 4), "dout": (4, 45, 4)}
    q, k, v, dout = (RNG.standard_normal(s).astype(dtype) for s in shapes.values())
    if "bias" in options:
        options["bias"] = RNG.standard_normal(options["bias"]).astype(dtype)
    result = flashsim.run(q, k, v, algorithm=algorithm, tiling=TILING, trace=True, **options)
    return result.trace, result.backward(dout, tiling=backward_tiling).trace


@pytest.fixture
def trace():
    return traces({"causal": True})[0]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.npz"


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "flash2", "flash2-fused"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_trace_comes_back(options, algorithm, path):
    for saved in traces(options, algorithm):
        saved.save(path)
        loaded = Trace.load(path)

        assert loaded.same_events(saved)
        assert loaded.device == saved.device
        for name in ("algorithm", "direction", "backend", "provenance"):
            assert getattr(loaded, name) == getattr(saved, name)
        for old, new in zip(saved.stages, loaded.stages, strict=True):
            assert new.stage == old.stage
            assert (new.repeat, new.stride) == (old.repeat, old.stride)
            assert new.events.dtype == old.events.dtype
            for mine, theirs in zip(new.schedule.row_csr, old.schedule.row_csr, strict=True):
                np.testing.assert_array_equal(mine, theirs)
            for mine, theirs in zip(new.schedule.col_csr, old.schedule.col_csr, strict=True):
                np.testing.assert_array_equal(mine, theirs)
        assert loaded.diff(loaded.predicted()) == {}
        assert (str(loaded), repr(loaded)) == (str(saved), repr(saved))
        if "mask" in options:
            assert isinstance(loaded.problem.mask, SavedMask)
        else:
            assert loaded.problem == saved.problem
            assert [s.schedule for s in loaded.stages] == [s.schedule for s in saved.stages]


@pytest.mark.parametrize("name", ["packed", "mask"])
def test_tiles_of_each_stage_come_back(name, path):
    tiling = Tiling(16, 8, dq_rows=32)
    _, saved = traces(OPTIONS[name], backward_tiling=tiling)
    saved.save(path)
    loaded = Trace.load(path)
    assert loaded.tiling == saved.tiling == tiling
    assert loaded.same_events(saved)
    assert loaded.diff(loaded.predicted()) == {}
    rewritten(path, header=lambda h: h["stages"][1].update(tiling=[16, 4]))
    if name == "packed":
        refused(path, "stage 'dkdv' has 16 x 4 tiles, but others 16 x 8 .dQ: 32 x 8")


MARKS = np.arange(70) % 3
#: Options that only some algorithms take; the algorithm is flash-decode where none is named.
SPECIAL = {
    "parts": {"splits": 3, "mask": far},
    "parts, packed heads": {"splits": 3, "pack_gqa": True, "mask": far},
    "one part": {"splits": 1, "causal": True},
    "shared prefix": {"cache_seqlens": [20, 30], "shared_prefix": 16, "splits": 2},
    "latent": {"head_dim_v": 6},
    "packed heads": {"algorithm": "flash2", "pack_gqa": True, "causal": True},
    "functions": {
        "algorithm": "flash2",
        "score_mod": lambda s, b, h, q, k: s + MARKS[k],
        "mask_mod": lambda b, h, q, k: (MARKS[q] == MARKS[k]) | (k < 9),
        "sinks": np.ones(4, np.float32),
    },
}


@pytest.mark.parametrize("options", SPECIAL.values(), ids=SPECIAL)
def test_a_trace_with_special_options_comes_back(options, path):
    x = tensors(3, 70, 8, batch=2, heads=4, kv_heads=1)
    x.k[1], x.v[1] = x.k[0], x.v[0]
    how = {"algorithm": "flash-decode", "tiling": Tiling(4, 16), "trace": True, **options}
    saved = flashsim.run(x.q, x.k, None if "head_dim_v" in options else x.v, **how).trace
    saved.save(path)
    loaded = Trace.load(path)
    assert loaded.same_events(saved)
    assert loaded.schedule.split == saved.schedule.split
    assert "mask" in options or loaded.problem == saved.problem
    assert loaded.diff(loaded.predicted()) == {}
    assert (loaded.flops(), loaded.peak_sram()) == (saved.flops(), saved.peak_sram())


def test_a_saved_mask_knows_tiles_but_not_scores(path):
    saved, _ = traces({"mask": far})
    saved.save(path)
    loaded = Trace.load(path)
    mask = loaded.problem.mask

    masked = next(visit for visit in loaded.schedule if visit.kind)
    with pytest.raises(TraceError, match=r"'far' was not saved.*not which scores"):
        _ = masked.keep
    with pytest.raises(TraceError, match="'far' was not saved"):
        mask(np.arange(3), np.arange(3))
    with pytest.raises(
        TraceError, match="which 16 x 8 tiles the mask keeps, not which 4 x 4 tiles"
    ):
        _ = flashsim.Schedule(loaded.problem, Tiling(4, 4)).row_csr
    assert repr(mask) == "SavedMask('far')"


def test_a_loaded_trace_can_be_saved_again(tmp_path):
    saved, _ = traces({"mask": far, "block_mask": grid(45, 51)})
    saved.save(tmp_path / "one.npz")
    Trace.load(tmp_path / "one.npz").save(tmp_path / "two.npz")

    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "two.npz") as two:
        assert one.files == two.files
        for name in one.files:
            np.testing.assert_array_equal(one[name], two[name])


def test_masks_without_a_name_are_called_by_their_type(path):
    class Stripes:
        def __call__(self, q, k):
            return (q + k) % 2 == 0

    saved, _ = traces({"mask": Stripes()})
    saved.save(path)

    assert repr(Trace.load(path).problem.mask) == "SavedMask('Stripes')"


def test_timelines_are_kept(trace, path):
    trace.timeline = np.zeros(5, TIMELINE)
    trace.timeline["phase"] = np.arange(5)
    trace.timeline["start_ns"] = 10**15 + np.array([50, 7, 99, 0, 12])  # in no order
    trace.timeline["end_ns"] = trace.timeline["start_ns"] + np.arange(5) ** 2
    for field in ("role", "sm", "head", "i", "j", "visit"):
        trace.timeline[field] = np.arange(5) % 3 - (field in ("i", "j", "visit"))
    trace.save(path)

    loaded = Trace.load(path).timeline

    np.testing.assert_array_equal(loaded, trace.timeline)
    assert loaded.dtype == TIMELINE


def test_a_timeline_of_another_shape_is_refused(trace, path):
    trace.timeline = np.zeros(5, TIMELINE)
    trace.save(path)
    rewritten(path, arrays={"timeline_head": np.zeros(4, np.int32)})

    refused(path, r"the header says timeline_head \[5\]; the file has timeline_head \[4\]")
    rewritten(path, header=lambda h: h.pop("members"))  # as files were before headers said so
    refused(path, r"timeline_head must have the same shape as .*, which is \(5,\), got \(4,\)")


def test_codes_are_read_by_their_names(trace, path):
    """A file from a flashsim that numbers its tensors in another order reads the same."""
    trace.timeline = np.zeros(len(PHASES), TIMELINE)
    trace.timeline["phase"] = np.arange(len(PHASES))
    trace.save(path)
    with np.load(path) as archive:
        events, timeline = archive["events_0"], archive["timeline_phase"]
    events["tensor"] = len(TENSORS) - 1 - events["tensor"]
    timeline = (len(PHASES) - 1 - timeline).astype(np.uint8)

    def reverse(header):
        header["names"]["tensor"].reverse()
        header["names"]["phase"].reverse()

    rewritten(path, header=reverse, arrays={"events_0": events, "timeline_phase": timeline})

    loaded = Trace.load(path)
    assert loaded.same_events(trace)
    np.testing.assert_array_equal(loaded.timeline, trace.timeline)


def test_loaded_events_are_read_only(trace, path):
    trace.save(path)

    with pytest.raises(ValueError, match="read-only"):
        Trace.load(path).stages[0].events["bytes"] = 0


def test_nothing_is_pickled(trace, path):
    trace.save(path)

    with np.load(path, allow_pickle=False) as archive:
        assert all(archive[name].dtype != object for name in archive.files)
        header = json.loads(archive["header"].tobytes())
    assert (header["format"], header["version"]) == ("flashsim-trace", 1)


@pytest.mark.parametrize("name", ["run.npz", "run.trace", "run"])
def test_the_name_is_taken_as_given(trace, tmp_path, name):
    trace.save(str(tmp_path / name))

    assert os.listdir(tmp_path) == [name]
    assert Trace.load(str(tmp_path / name)).same_events(trace)


# -- files that are not, or no longer, traces ---------------------------------------------------


def refused(path, text):
    with pytest.raises(TraceError, match=text) as caught:
        Trace.load(path)
    assert path.name in str(caught.value)


def test_no_file(path):
    refused(path, "cannot read a trace from .*No such file")
    refused(path.parent, "cannot read a trace from .*directory")


@pytest.mark.parametrize("content", [b"", b"P", b"a,b\n1,2\n", b"\x93NUMPY\x01\x00v\x00"])
def test_foreign_files(path, content):
    path.write_bytes(content)
    refused(path, "is not a flashsim trace file")


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"q": b"abc", "k": b"abc"}, "because it has the members q, k and no 'header'"),
        ({"header": b'{"format": "other"}'}, "an archive with a header, but not a flashsim trace"),
        ({"header": b"[1]"}, "an archive with a header, but not a flashsim trace"),
    ],
)
def test_foreign_archives(path, members, text):
    np.savez(path, **{name: np.frombuffer(x, np.uint8) for name, x in members.items()})
    refused(path, text)


def test_damage_that_zip_and_numpy_report_in_their_own_ways_is_refused(trace, path):
    trace.save(path)
    whole = path.read_bytes()
    directory = whole.index(b"PK\x01\x02")
    encrypted = bytes([whole[directory + 8] | 1])  # the flag of the archive's first entry
    path.write_bytes(whole[: directory + 8] + encrypted + whole[directory + 9 :])
    refused(path, "truncated or damaged")

    text = b"{'descr': ("  # NumPy's parser: a multi-line statement without an end
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "header.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        )
    refused(path, "truncated or damaged")


DAMAGED = "truncated or damaged.*"
TYPE = f"{DAMAGED}events_0 in the file must have dtype .*"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"header": lambda h: h.update(version=2, flashsim="9.9")},
            r"trace format 2 and was written by flashsim 9\.9, .* only formats up to 1; install",
        ),
        ({"header": lambda h: h.pop("device")}, f"{DAMAGED}the header lacks the key 'device'"),
        ({"drop": ["events_0"]}, rf"{DAMAGED}missing: \['events_0'\], unknown: none"),
        (
            {"arrays": {"events_1": np.zeros(3)}},
            rf"{DAMAGED}missing: none, unknown: \['events_1'\]",
        ),
        ({"arrays": {"events_0": np.zeros(3)}}, f"{TYPE} got float64"),
        ({"arrays": {"events_0": np.array([None])}}, f"{TYPE} got object"),
        ({"arrays": {"header": np.frombuffer(b"{", np.uint8)}}, f"{DAMAGED}JSONDecodeError"),
    ],
)
def test_a_newer_format_and_archives_that_do_not_add_up(trace, path, change, text):
    trace.save(path)
    rewritten(path, **change)
    refused(path, text)


def test_no_pickle_is_ever_run(path):
    """An object array in place of the header is refused without being unpickled."""

    class Bomb:
        def __reduce__(self):
            return os.abort, ()

    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.array([Bomb()]), allow_pickle=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.npy", buffer.getvalue())
    refused(path, r"header in the file must have dtype uint8 in C order, got object")


# -- writing ------------------------------------------------------------------------------------


def test_saving_replaces_a_file(trace, path):
    path.write_text("something else")
    trace.save(path)

    assert Trace.load(path).same_events(trace)


def test_an_interrupted_save_leaves_the_old_file_and_no_litter(trace, path, monkeypatch):
    trace.save(path)
    before = path.read_bytes()
    write = np.savez_compressed

    def full_disk(file, **arrays):
        write(file, **arrays)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracefile.np, "savez_compressed", full_disk)
    with pytest.raises(TraceError, match=r"cannot write a trace to .*run\.npz.*No space left"):
        trace.save(path)

    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_does_not_exist(trace, tmp_path):
    with pytest.raises(TraceError, match="the folder must exist and be writable"):
        trace.save(tmp_path / "no" / "run.npz")


def test_files_get_the_usual_permissions(trace, path):
    umask = os.umask(0o022)
    try:
        trace.save(path)
    finally:
        os.umask(umask)

    assert stat.S_IMODE(path.stat().st_mode) == 0o644
