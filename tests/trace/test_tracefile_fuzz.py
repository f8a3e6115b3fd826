"""Damaged and crafted trace files: a TraceError or the very trace, in bounded memory."""

import io
import json
import tracemalloc
import zipfile

import numpy as np
import pytest
from trace_files import header_is_refused, headers, rewritten

import flashsim
from flashsim import BlockMask, FlashSimError, Tiling, Trace, TraceError
from flashsim.schedule.names import COMPUTE, FREE
from flashsim.trace import archive, validate
from flashsim.trace.events import EVENT, PHASES, TIMELINE

pytestmark = pytest.mark.promise("hostile files refused")

SEED = 20
#: Places at which each file is damaged in each of `DAMAGES`; values tried at each of a header's.
MANY = pytest.mark.thorough
PLACES = [15, pytest.param(60, marks=MANY)]
VALUES = [1, pytest.param(4, marks=MANY)]


def far(q, k):
    return (q - k) % 5 < 3


def recorded(name):
    """A small trace of each kind of member."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 19, 4), dtype=np.float32) for _ in range(3))
    options = {
        "plain": {"causal": True},
        "timeline": {},
        "mask": {"mask": far},
        "block mask": {"block_mask": BlockMask(rng.random((4, 4)) < 0.7, 5, 5)},
        "backward": {"bias": rng.standard_normal((2, 19, 19)).astype(np.float32), "softcap": 3.0},
    }
    tiling = Tiling(8, 4)
    result = flashsim.run(q, k, v, tiling=tiling, trace=True, **options[name.removesuffix(", old")])
    if name.startswith("backward"):
        return result.backward(q, tiling=tiling).trace
    if name.startswith("timeline"):
        spans = np.zeros(12, TIMELINE)
        spans["phase"] = np.arange(12) % len(PHASES)
        spans["sm"] = np.arange(12) % 3
        spans["start_ns"] = 10**15 + rng.integers(0, 99, 12)
        spans["end_ns"] = spans["start_ns"] + np.arange(12)
        result.trace.timeline = spans
    return result.trace


def file_of(name, folder):
    """The file of such a trace."""
    path = folder / "run.npz"
    recorded(name).save(path)
    return path


def without_members(header):
    del header["members"]  # as files were before their headers said what they hold


@pytest.fixture(params=["plain", "timeline", "timeline, old", "mask", "block mask", "backward"])
def saved(request, tmp_path):
    """A trace and its file."""
    trace, path = recorded(request.param), tmp_path / "run.npz"
    trace.save(path)
    if request.param.endswith(", old"):
        rewritten(path, header=without_members)
    return trace, path


def same(one, other):
    """Whether two traces are one and the same."""
    stages = [
        (a.stage, a.repeat, a.stride, a.schedule.tiling, a.schedule.key_order)
        == (b.stage, b.repeat, b.stride, b.schedule.tiling, b.schedule.key_order)
        for a, b in zip(one.stages, other.stages, strict=True)
    ]
    timelines = one.timeline is other.timeline is None or np.array_equal(
        one.timeline, other.timeline
    )
    names = ("algorithm", "direction", "backend", "provenance", "device")
    alike = all(getattr(one, name) == getattr(other, name) for name in names)
    masks = one.problem.mask is not None or one.problem == other.problem
    return all(stages) and timelines and alike and masks and one.same_events(other)


def flip(whole, place, rng):
    return whole[:place] + bytes([whole[place] ^ (1 << rng.integers(8))]) + whole[place + 1 :]


def overwrite(whole, place, rng):
    return whole[:place] + bytes([rng.integers(256)]) + whole[place + 1 :]


def insert(whole, place, rng):
    return whole[:place] + rng.bytes(rng.integers(1, 9)) + whole[place:]


def remove(whole, place, rng):
    return whole[:place] + whole[place + rng.integers(1, 9) :]


def truncate(whole, place, rng):
    return whole[:place]


def repeat(whole, place, rng):
    return whole[:place] + whole[max(place - rng.integers(1, 60), 0) :]


DAMAGES = (flip, overwrite, insert, remove, truncate, repeat)


@pytest.mark.parametrize("n", PLACES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_anywhere_is_refused_or_does_not_matter(saved, damage, n):
    trace, path = saved
    whole, rng = path.read_bytes(), np.random.default_rng(SEED)
    directory = whole.index(b"PK\x01\x02")  # as many places in the directory as before it
    places = [*rng.integers(directory, size=n), *rng.integers(directory, len(whole), n)]
    tracemalloc.start()
    try:
        for place in places:
            path.write_bytes(damage(whole, int(place), rng))
            try:
                loaded = Trace.load(path)
            except TraceError:
                continue
            assert same(loaded, trace), f"{damage.__name__} at {place} of seed {SEED}"
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_member_whose_name_in_the_directory_is_damaged_is_missed(tmp_path):
    """The trace must not come back without its timeline."""
    path = file_of("timeline", tmp_path)
    whole = path.read_bytes()
    for old in (False, True):
        for name in (b"timeline_sm", b"timeline_end_ns", b"events_0"):
            at = whole.rindex(name)
            path.write_bytes(whole[:at] + b"x" + whole[at + 1 :])
            with pytest.raises(TraceError, match="truncated or damaged"):
                Trace.load(path)
        path.write_bytes(whole)
        if not old:
            rewritten(path, header=without_members)
            assert Trace.load(path).timeline is not None
            whole = path.read_bytes()


# -- archives that zipfile and NumPy find nothing wrong with ------------------------------------

ODD = (-1, 0, 1, 3, 2**31, 2**40, 2**63, 10**30, 0.5, 1e300, "x", "", None, True, [], {}, [[1]])


def leaves(value, path=()):
    """Where values are in a JSON tree, inner nodes too."""
    yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))


def replaced(tree, path, value):
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


def answers(path):
    """Load a file; if it is accepted, whatever one asks of it must have an answer."""
    try:
        loaded = Trace.load(path)
    except TraceError:
        return False
    try:
        str(loaded), repr(loaded), loaded.flops(), loaded.peak_sram(), loaded.by_head()
        loaded.by_tile(), loaded.frame(), loaded.cumulative(), loaded.diff(loaded.predicted())
    except FlashSimError:
        pass
    loaded.save(path)
    return True


@pytest.mark.parametrize("n", VALUES)
@pytest.mark.parametrize("name", ["timeline", "mask", "block mask", "backward"])
def test_any_value_of_a_header_is_refused_or_good(name, n, tmp_path):
    path = file_of(name, tmp_path)
    whole = path.read_bytes()
    with np.load(path) as archive:
        header = json.loads(archive["header"].tobytes())
    rng = np.random.default_rng(SEED)
    places = [place for place in leaves(header) if place[:1] != ("names",) or len(place) < 3]
    good = 0
    for place in places:
        for value in (ODD[n] for n in rng.choice(len(ODD), n, replace=False)):
            text = json.dumps(replaced(header, place, value)).encode()
            with zipfile.ZipFile(path, "w") as archive, zipfile.ZipFile(io.BytesIO(whole)) as old:
                for member in old.namelist():
                    data = old.read(member)
                    if member == "header.npy":
                        buffer = io.BytesIO()
                        np.lib.format.write_array(buffer, np.frombuffer(text, np.uint8))
                        data = buffer.getvalue()
                    archive.writestr(member, data)
            try:
                good += answers(path)
            except Exception as error:
                raise AssertionError(f"header{place} = {value!r}: {error!r}") from error
    assert good < len(places)


def limits(dtype):
    return np.iinfo(dtype).min, np.iinfo(dtype).max


@pytest.mark.parametrize("name", ["timeline", "mask", "block mask", "backward"])
def test_any_number_in_a_table_is_refused_or_good(name, tmp_path):
    path = file_of(name, tmp_path)
    whole, rng = path.read_bytes(), np.random.default_rng(SEED)
    for _ in range(50):

        def spoil(arrays):
            member = sorted(arrays)[rng.integers(len(arrays))]
            table = arrays[member].copy()
            field = table[rng.choice(table.dtype.names)] if table.dtype.names else table
            low, high = (0, 1) if field.dtype == np.bool_ else limits(field.dtype)
            number = int(rng.choice([low, high, 0, 1, 7]))
            field.reshape(-1)[rng.integers(field.size)] = min(number, high)
            return {member: table}

        path.write_bytes(whole)
        rewritten(path, arrays=spoil)
        answers(path)


SPOILED = headers(
    """
stages.0.repeat = -1 -> 'repeat' must be 2, got -1
stages.0.stride = 7 -> 'stride' must be 1, got 7
stages.0.outer = "keys" -> 'outer' must be 'queries', got 'keys'
stages.0.outer = "k" * 999 -> 'queries', got 'kkk ... kkk...)
stages.0.name = "dq" -> the forward pass of flash2 has no stage 'dq'; its stages are 'forward'
stages.0.tiling = [10**20, 4] -> a stage's tiling must be integers
stages.0.tiling = [8, 4, 4] -> a stage's tiling must be a list of 2
stages = [] -> the header lists no stages
stages = {"a": 1} -> 'stages' must be a list, got {'a': 1}
algorithm = "x" -> unknown algorithm 'x'
direction = "up" -> unknown direction 'up'
backend = 3 -> 'backend' must be a string, got 3
problem.n_q = 2**40 -> n_q must be ... , got 1099511627776
problem.n_q = 10**6 -> must have ... events
problem.n_q = -1 -> n_q must be at least 1, got -1
problem.colour = 1 -> argument 'colour'
names = [] -> 'names' must be an object, got []
names.tensor.0 = "X" -> in the header's entry 'names', 'tensor' has unknown names: 'X'
device.hbm_bandwidth = "x" -> hbm_bandwidth must be
device.tensor_flops.float16 = None -> tensor_flops
provenance = {"gpu": 3} -> 'gpu' must be a string, got 3
members.events_1 = [3] -> the header says events_1 [3]
members = [] -> members must be a JSON object, got []
version = "x" -> ValueError
"""
)


@pytest.mark.parametrize(("place", "value", "text"), SPOILED)
def test_a_header_that_is_not_sound_is_refused(tmp_path, place, value, text):
    path = file_of("plain", tmp_path)
    header_is_refused(path, place, value, text)


def first(field, value):
    """Return a change of the load of Q."""
    return lambda table: table[field].__setitem__(0, value)


def computes_nothing(table):
    visits = (table["op"] == COMPUTE) & (table["visit"] >= 0)
    table["op"][visits], table["level"][visits] = FREE, 1


def moves_nothing(table):
    table["bytes"] = 0


def ends_a_step_early(table):
    table["visit"] = -1


def keeps_a_tile(table):
    last = np.flatnonzero(table["op"] == FREE)[-1]
    table["bytes"][last] = 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (first("op", 200), "codes of op: the values .* but are from 0 to 200"),
        (first("tensor", 99), "codes of tensor"),
        (first("level", 1), "the level of an event must be 0 for a transfer"),
        (first("head", 5), "head: the values .* but are from 0 to 5"),
        (first("i", 3), "i: the values must be from -1 to 2, but are from 0 to 3"),
        (first("i", -1), "an event lacks its tile"),
        (first("j", 5), "j: the values .* but are from -1 to 5"),
        (first("visit", 15), "visit: the values .* but are from -1 to 15"),
        (first("bytes", -1), "bytes: the values .* but are from -1"),
        (first("bytes", 2**60), "bytes: the values must be from"),
        (first("bytes", 0), "its events free more bytes than are on chip"),
        (computes_nothing, "the events of a visit include no compute event"),
        (moves_nothing, "the trace moves no bytes between HBM and SRAM"),
        (ends_a_step_early, "a step ends before it has freed all its buffers"),
        (keeps_a_tile, r"its events leave \d+ bytes on chip at the end"),
    ],
)
def test_events_that_cannot_be_are_refused(tmp_path, change, text):
    path = file_of("plain", tmp_path)
    table = Trace.load(path).stages[0].events.copy()
    change(table)
    rewritten(path, arrays={"events_0": table})
    with pytest.raises(TraceError, match=text):
        Trace.load(path)


@pytest.fixture
def parts(monkeypatch):
    """The lengths of the parts of tables that are checked, as they are read."""
    found = []
    check = validate.StageLimits.check_events

    def noted(limits, table, length):
        found.append(len(table))
        check(limits, table, length)

    monkeypatch.setattr(validate.StageLimits, "check_events", noted)
    return found


def test_of_any_number_of_zeros_only_the_first_part_is_read(tmp_path, parts):
    path = file_of("plain", tmp_path)

    def long(header):
        header["problem"].update(n_q=1 << 16, n_kv=1 << 16)

    bomb(path, "events_0", np.zeros(1 << 22, EVENT), long)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(TraceError, match="its events compute nothing"):
        Trace.load(path)
    assert len(parts) == 1
    assert 28 * parts[0] <= 1 << 25


def test_a_long_table_is_read_in_parts(tmp_path, parts, monkeypatch):
    path = tmp_path / "run.npz"
    trace = recorded("plain")
    trace.save(path)
    monkeypatch.setattr(archive, "_PART_BYTES", 28 * 70)
    assert Trace.load(path).same_events(trace)
    assert sum(parts) == len(trace.stages[0].events)
    assert len(parts) > 1
    assert set(parts[:-1]) == {70}


def bomb(path, member, array, header=lambda h: None):
    """Replace a member by one that is small only while it is compressed."""

    def change(said):
        said["members"][member] = list(array.shape)
        header(said)

    rewritten(path, header=change, arrays={member: array})


@pytest.mark.parametrize(
    ("member", "array"),
    [
        ("events_0", np.zeros(1 << 21, EVENT)),
        ("header", np.full(1 << 25, ord(" "), np.uint8)),
        ("mask_0_col", np.zeros(1 << 24, np.int32)),
        ("mask_0_ptr", np.zeros(1 << 24, np.int32)),
    ],
)
def test_a_bomb_is_not_unpacked(tmp_path, member, array):
    path = file_of("mask", tmp_path)
    bomb(path, member, array)
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="truncated or damaged"):
            Trace.load(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_an_array_that_declares_what_it_does_not_hold_is_not_allocated(tmp_path):
    path = file_of("plain", tmp_path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (length,) = json.loads(members["header.npy"][128:])["members"]["events_0"]
    events = members["events_0.npy"]
    for shape in (f"({10**12},)", "(-1,)", "(1.5,)", f"({length}, 1)", "()"):
        text = events.replace(f"({length},)".encode(), shape.encode(), 1)
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, text if name == "events_0.npy" else data)
        with pytest.raises(TraceError, match="truncated or damaged"):
            Trace.load(path)


@pytest.mark.parametrize("path", [None, 3, b"\xff", "a\0b", ["x"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(FlashSimError):
        Trace.load(path)
    with pytest.raises(FlashSimError):
        recorded("plain").save(path)
