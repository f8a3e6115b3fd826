"""An argument of the wrong type is named by an error of ours, whichever function gets it.

Each parameter of each call below is replaced in turn by values that it does not expect. A call may
take one all the same; what it may not do is end in an error of Python's.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest
from refusals import refuses

import flashsim
from flashsim import DTypeError, FlashSimError, Problem, Tiling
from flashsim.errors import own_errors

pytestmark = pytest.mark.promise("refuses bad input")

WRONG = [None, -1, 1.5, float("nan"), "nosuch", [None], {"a": None}, object(), np.zeros((2, 2))]

SMALL = Problem(64, head_dim=16, heads=2)
LARGE = Problem(4096, head_dim=128, heads=16, dtype="bfloat16", causal=True)
TILE = Tiling(16, 16)
q, k, v = np.random.default_rng(0).standard_normal((3, 32, 16), dtype=np.float32)
SPREAD, HEAD = Problem(256, head_dim=16), Problem(32, head_dim=16)
# Made when a test needs them, and not in each process that collects this file.
TRACE = cache(lambda: flashsim.run(q, k, v, tiling=TILE, trace=True).trace)
COUNTED = cache(lambda: flashsim.count(SMALL, tiling=TILE))
CURVES = cache(lambda: {"a": flashsim.l2.curves(COUNTED())["forward"]})
CURVE = cache(lambda: CURVES()["a"])
SIZES = cache(lambda: flashsim.blocks.sizes(LARGE, (64,)))
DELTA = cache(lambda: flashsim.exercises.get("delta"))
TASK = cache(lambda: DELTA().task)
ACCOUNT = cache(lambda: flashsim.distributed.count(SPREAD, ranks=4))
LABORATORY = cache(lambda: flashsim.precision.laboratory((64,), points=("s",), kinds=("normal",)))

CALLS = {
    "predict.when": {"problem": LARGE, "lengths": [128]},
    "predict.versions": {"problem": LARGE},
    "predict.spread": {"problem": LARGE, "ranks": 4},
    "predict.least": {"traffic": COUNTED},
    "blocks.sizes": {"problem": LARGE, "sides": (64,)},
    "blocks.mixed": {"problem": LARGE, "tilings": {"dkdv": TILE, "dq": TILE}},
    "walkthrough.softmax": {"logits": [1, 2]},
    "walkthrough.tiles": {},
    "walkthrough.delta": {},
    "walkthrough.corrections": {},
    "walkthrough.reread": {},
    "exercises.get": {"name": "delta"},
    "exercises.grade": {"given": "", "exercise": DELTA},
    "claims.judge": {"name": "268-times"},
    "claims.overview": {"full": cache(lambda: flashsim.claims.table("268-times"))},
    "banks.access": {},
    "banks.table": {},
    "precision.draw": {"kind": "normal", "n": 64},
    "precision.laboratory": {"n": (64,), "points": ("s",), "kinds": ("normal",)},
    "precision.presets": {"n": 64},
    "softmax_matmul.count": {"batch": 1, "d1": 64, "d2": 64, "d3": 16},
    "softmax_matmul.run": {"x": q[None], "v": np.ones((1, 16, 4), np.float32)},
    "merge": {"out_a": q, "lse_a": np.zeros(32, "f4"), "out_b": q, "lse_b": np.zeros(32, "f4")},
    "oracle.attention": {
        **{"q": q[None, None], "k": k[None, None], "v": v[None, None]},
        "problem": HEAD,
    },
    "oracle.keep_matrix": {"problem": SMALL},
    "verify.draw": {"count": 1, "kernels": ["portable"]},
    "verify.table": {"found": []},
    "verify.counts_beside": {"path": "x"},
    "verify.parse": {"text": ""},
    "verify.Case": {"problem": SMALL},
    "distributed.count": {"problem": SPREAD, "ranks": 2},
    "warm": {},
    "quantize": {"q": q, "k": k, "v": v},
}
METHODS = [
    *((TRACE, name, {}) for name in ("bytes", "by_tile", "dram", "flops", "frame", "on_chip")),
    *((TRACE, name, {"other": TRACE}) for name in ("diff", "same_events")),
    (TRACE, "sram_timeline", {}),
    (TRACE, "stage", {"name": "forward"}),
    (CURVE, "reads", {"l2_bytes": 10}),
    (CURVE, "writes", {"l2_bytes": 10}),
    (SIZES, "best", {"stage": "forward"}),
    (TASK, "arrays", {}),
    (
        TASK,
        "run",
        {"solution": cache(lambda: TASK().run), "arrays": cache(lambda: TASK().arrays())},
    ),
    (ACCOUNT, "link_bytes", {}),
    (ACCOUNT, "destination", {"rank": 0, "step": 0}),
    (ACCOUNT, "rank_table", {"rank": 0}),
    (
        cache(lambda: flashsim.exercises.Lesson("x")),
        "ask",
        {"question": "q", "said": 1, "right": 1},
    ),
]
PICTURES = {
    "traffic": {"data": TRACE},
    "tile_map": {"data": TRACE},
    "sram_timeline": {"data": TRACE},
    "cumulative": {"data": TRACE},
    "diff": {"first": TRACE, "second": TRACE},
    "banks": {"data": cache(lambda: flashsim.banks.access())},
    "block_sizes": {"data": SIZES},
    "precision": {"data": LABORATORY},
    "rank_timeline": {"accounts": ACCOUNT},
    "scaling": {"times": cache(lambda: {"a": [flashsim.predict.spread(LARGE, ranks=4)]})},
    "l2_curve": {"curves": CURVES},
    "mask": {"problem": SMALL},
    "memory_footprint": {"data": SMALL, "n": (64, 128)},
    "roofline": {"data": COUNTED},
    "predicted_against_measured": {"points": {"a": [(1.0, 1.1)]}},
    "row_statistics": {"trace": TRACE, "q": q, "k": k},
    "save_figure": {"figure": None, "path": "x.png"},
    "page": {"data": TRACE},
    "animate_ranks": {"account": ACCOUNT, "path": "x.nosuch"},
}


def made(x):
    """The value of one of the functions above, or `x`."""
    return x() if isinstance(x, type(TRACE)) else x


def never_bare(function, arguments):
    arguments = {name: made(x) for name, x in arguments.items()}
    bare = []
    for name in inspect.signature(function).parameters:
        for wrong in WRONG:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    function(**{**arguments, name: wrong})
            except FlashSimError:
                pass
            except Exception as error:
                bare.append((name, wrong, error))
    assert not bare


@pytest.mark.parametrize("name", CALLS)
def test_no_function_ends_in_an_error_of_pythons(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    room, _, function = name.rpartition(".")
    never_bare(getattr(getattr(flashsim, room) if room else flashsim, function), CALLS[name])


@pytest.mark.parametrize(
    ("of", "name", "given"), METHODS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_no_method_ends_in_an_error_of_pythons(of, name, given):
    never_bare(getattr(made(of), name), given)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="figures need Matplotlib")
@pytest.mark.parametrize("name", PICTURES)
def test_no_picture_ends_in_an_error_of_pythons(name, tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    open_before = plt.get_fignums()
    first, *others = PICTURES[name]
    with pytest.raises(FlashSimError):
        getattr(flashsim.viz, name)(
            **{first: object()}, **{other: made(PICTURES[name][other]) for other in others}
        )
    assert plt.get_fignums() == open_before  # nor does one leave an empty figure
    never_bare(getattr(flashsim.viz, name), PICTURES[name])
    plt.close("all")


test_what_was_wrong_what_was_given_what_would_do = refuses(r"""
flashsim.predict.when(None)
    -> DTypeError: ^when(): problem must be Problem, got None (NoneType)
flashsim.blocks.sizes(LARGE, sides=-1)
    -> DTypeError: ^sizes(): sides must be Sequence[int], got -1 (int
flashsim.walkthrough.softmax(logits=None)
    -> DTypeError: ^softmax(): logits must be Sequence[float], got None
flashsim.precision.draw("normal", 8, heads=-1) -> ShapeError: heads must be at least 1, got -1
flashsim.precision.draw("normal", 2**62)
    -> OptionError: GB of memory, but this machine has ... GB; use a smaller n
flashsim.verify.draw(2**62, kernels=["portable"]) -> OptionError: count= must be at most 10,000
CURVE().reads(float("nan")) -> OptionError: size of L2 must be at least 0 B, got nan
ACCOUNT().link_bytes(rank=-1) -> OptionError: rank must be from 0 to 3, got -1
flashsim.oracle.attention(q[None, None], k[None, None, :-1], v[None, None], HEAD)
    -> ShapeError: k must have shape (1, 1, 32, 16), as the problem requires
TRACE().to_perfetto("nosuch/trace.json")
    -> OptionError: cannot write ... : No such file ... the folder must exist
""")


def spans(**how):
    """Draw a timeline, where Matplotlib is installed."""
    pytest.importorskip("matplotlib")
    return flashsim.viz.gpu_timeline(flashsim.load_sample_trace(), **how)


test_a_picture_names_what_was_wrong = refuses(r"""
spans(sms=[0]) -> DTypeError: sms must be tuple[ ... got
spans(times=(1,)) -> DTypeError: times must be tuple[ ... got
spans(sms="no") -> DTypeError: sms must be tuple[ ... got
""")


def test_the_error_of_pythons_is_kept_as_the_cause():
    with pytest.raises(DTypeError) as caught:
        flashsim.exercises.get(7)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_what_fits_an_annotation_is_not_blamed():
    @own_errors
    def broken(a: int, b: float, c: tuple[int, int] | None, d: list[str], e: bool = False) -> None:
        raise KeyError("inside")

    for fits in ((np.int64(1), 1, None, ["x"]), (1, np.float32(1), [1, 2], ["x"], np.True_)):
        with pytest.raises(KeyError, match="inside"):
            broken(*fits)
    for misfit, name in (((1.5, 1, None, []), "a"), ((True, 1, None, []), "a")):
        with pytest.raises(DTypeError, match=f"broken..: {name} must be int"):
            broken(*misfit)
    with pytest.raises(DTypeError, match=r"c must be tuple\[int, int\] \| None, got \(1,\)"):
        broken(1, 1, (1,), [])
    with pytest.raises(DTypeError, match=r"d must be list\[str\], got 'text'"):
        broken(1, 1, None, "text")
