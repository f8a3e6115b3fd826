"""What plots, animations and pages refuse, in their words."""

import pytest
import viz_cases as cases
from refusals import refusals, refused

import flashsim
from flashsim import Problem, Tiling
from flashsim.distributed import count
from flashsim.trace.steps import Steps
from flashsim.viz import palette

pytestmark = pytest.mark.promise("refuses bad input")

MODULES = {name: getattr(flashsim, name) for name in ("viz", "banks", "blocks", "precision")}
ENDLESS = [cases.trace()]
ENDLESS.append(ENDLESS)
LONG = "x" * 10_000
Q, K, _ = cases.arrays()
COUNTED = flashsim.count(Problem(512, head_dim=64, dtype="bfloat16"))
CAUSAL = Problem(256, heads=2, causal=True)


def trace(*which, **more):
    return cases.trace(*which, **more)


def account(ranks=4):
    return count(CAUSAL, ranks=ranks, scheme="zigzag", tiling=Tiling(16, 16))


def failed():
    """The points of a sweep that fail."""
    sweep = flashsim.sweep([512, 1024], tiling=Tiling(512, 512), sram_bytes=65536)
    return [row for row in sweep.rows if row["status"] != "ok"]


REFUSED = refusals(r"""
viz.traffic(trace(), theme="sepia") -> OptionError: unknown theme 'sepia'
viz.traffic(7) -> DTypeError: expected a Trace
viz.traffic("flash2") -> DTypeError: expected a Trace
viz.traffic([3]) -> DTypeError: expected a Trace
viz.traffic([]) -> OptionError: the argument contains no trace
viz.cumulative({str(n): trace() for n in range(9)}) -> OptionError: at most 8 passes, got 9
viz.traffic({str(n): trace() for n in range(9)}) -> OptionError: at most 8 passes, got 9
viz.memory_footprint(flashsim.sweep([64], heads=[1, 2])) -> OptionError: 2 points at n_q=64
viz.io_curve(flashsim.sweep([64, 96], softcap=[0, 1])) -> OptionError: 2 points at n_q=64
viz.cumulative({}) -> OptionError: the argument contains no trace
viz.traffic(flashsim.sweep([64, 128])) -> DTypeError: a Sweep has only totals ... viz.io_curve
viz.cumulative(flashsim.sweep([64, 128])) -> DTypeError: a Sweep has only totals ... viz.io_curve
viz.page(flashsim.sweep([64, 128])) -> DTypeError: a Sweep has only totals ... viz.io_curve
viz.tile_map(flashsim.run(Q, K, K, tiling=cases.TILING))
    -> TraceError: pass trace=True to run
viz.tile_map(trace(), color="time")
    -> OptionError: unknown color 'time'; choose from order, bytes, flops, block
viz.mask(Problem(32), bias=np.zeros(32))
    -> OptionError: one value per score, (32, 32), got (32,)
viz.mask(Problem(4096)) -> OptionError: 4,194,304 single scores; got 4,096 x 4,096
viz.mask(3) -> DTypeError: problem must be Problem, got 3
viz.cumulative(trace(), quantity="time") -> OptionError: unknown quantity 'time'
viz.sram_timeline(cases.result(), stage="forward", steps=(9, 9))
    -> OptionError: steps= must be a range (first, last) within
viz.sram_timeline(cases.result(), stage="dq") -> OptionError: unknown stage 'dq'
viz.diff([trace()] * 6) -> OptionError: diff takes two traces, got 6: FlashAttention-2
viz.io_curve([COUNTED]) -> OptionError: points that differ in one of n_q, head_dim
viz.io_curve(flashsim.sweep([64, 128]), x="n") -> OptionError: unknown x 'n'; choose from n_q
viz.io_curve(failed()) -> OptionError: every point of this sweep failed
viz.roofline(flashsim.count(Problem(9, mask_mod=lambda b, h, q, k: k < 0)))
    -> OptionError: has no matrix products, because the mask keeps no score
viz.roofline(COUNTED, seconds={"flash1": 1.0})
    -> OptionError: unknown label in seconds= 'flash1'; choose from
viz.roofline(COUNTED, seconds={"flash2": float("nan")})
    -> OptionError: must be finite and at least 1e-12, got nan
viz.roofline(COUNTED, seconds={"flash2": 1e-300})
    -> OptionError: must be finite and at least 1e-12, got 1e-300
viz.roofline(COUNTED, dram_bytes={"flash2": "x"}) -> DTypeError: must be a number, got 'x'
viz.gpu_timeline(cases.with_timeline(sm_count=2), color="sm")
    -> OptionError: unknown color 'sm'; choose from phase, block
viz.gpu_timeline(trace()) -> TraceError: run on a GPU backend with trace="timeline"
viz.gpu_timeline(cases.with_timeline(), sms=(70, 80))
    -> OptionError: no span of stage 'forward' on SMs 70 to 80 from 0 to 0 µs; ... SMs 0 to 2
viz.gpu_timeline(cases.with_timeline(), times=(0.5, 0.1))
    -> OptionError: no span of stage 'forward' on SMs 0 to 2 from 0.5 to 0.1 µs
viz.roofline_series({}, device="A100") -> OptionError: both numbers positive
viz.roofline_series({"a": [("b", 0.0, 1.0)]}, device="A100") -> OptionError: both numbers positive
viz.banks([]) -> OptionError: pass one or more
viz.banks([banks.access("column", columns=512)]) -> OptionError: fewer columns
viz.precision(precision.laboratory((32,), kinds=("normal",), points=("lse",)), kind="heavy")
    -> OptionError: there are no results for 'heavy' inputs of length 32
viz.block_sizes(None) -> DTypeError: must be the result of flashsim.blocks.sizes, got None
viz.block_sizes(blocks.sizes(Problem(1024, head_dim=128), (64,)), stage="dq")
    -> OptionError: unknown stage 'dq'
viz.l2_curve({}) -> OptionError: nothing to draw: pass one or more results
viz.predicted_against_measured({"a": []}) -> OptionError: no points to draw
viz.predicted_against_measured({"a": [(1.0, 0.0)]}) -> OptionError: must be positive, got 0
viz.rank_timeline([]) -> OptionError: nothing to draw: pass one or more results
viz.scaling({}) -> OptionError: nothing to draw
viz.animate_ranks(account(ranks=1), "a.gif") -> OptionError: rings of 2 to 16 members, got 1
viz.animate_ranks(account(), "a.png") -> OptionError: an animation's file name must end in
viz.animate_ranks(account(), "a.gif", frames_a_step=65)
    -> OptionError: frames_a_step must be at most 64, got 65
viz.animate_ranks(account(), "a.gif", fps=0) -> OptionError: fps= must be from 0.01 to 1,000, got 0
viz.animate_ranks(account(), "a.gif", fps=0.001)
    -> OptionError: fps= must be from 0.01 to 1,000, got 0.001
viz.animate(trace(), "walk.avi") -> OptionError: cannot write 'walk.avi' ... .gif, .mp4, .html
viz.animate(trace(), "walk.gif", clock="time")
    -> OptionError: unknown clock 'time'; choose from steps, bytes
viz.animate([trace()] * 3, "walk.gif") -> OptionError: at most two traces, got 3
viz.animate(trace(), "walk.gif", max_frames=0) -> OptionError: max_frames= must be positive, got 0
viz.animate(trace(), "walk.gif", fps=0) -> OptionError: fps= must be from 0.01 to 1,000
viz.animate(trace(), "walk.gif", fps=1e-3) -> OptionError: fps= must be from 0.01 to 1,000
viz.animate(trace(), "walk.gif", fps=float("inf")) -> OptionError: fps= must be from 0.01 to 1,000
viz.page(trace(), "nowhere/page.html") -> OptionError: cannot write ' ... page.html' ... folder must
viz.page([trace()] * 3) -> OptionError: at most two traces, got 3
viz.page(trace(), theme="blue")
    -> OptionError: unknown theme 'blue'; choose from auto, light, dark
viz.lab(theme="blue") -> OptionError: unknown theme 'blue'; choose from auto, light, dark
viz.page(trace(), title="\udfff")
    -> OptionError: the title '\udfff' contains half of a character
viz.page(trace(), title=LONG) -> OptionError: the title ... has 10,000 characters
viz.page({LONG: trace()})
    -> OptionError: has 10,000 characters, which is too long; use at most 200
viz.traffic({LONG: trace()})
    -> OptionError: has 10,000 characters, which is too long; use at most 200
viz.cumulative({LONG: trace()})
    -> OptionError: has 10,000 characters, which is too long; use at most 200
viz.page(ENDLESS) -> OptionError: a list that contains itself
viz.traffic(ENDLESS) -> OptionError: a list that contains itself
viz.page(trace(), max_mb=0.0001) -> OptionError: over 0.0001 MB
Steps(type(trace())(trace().problem, trace().device, "flash2", "forward", "simulator", ()))
    -> TraceError: no steps to show
viz.row_statistics(trace("standard"), Q, K) -> UnsupportedError: this trace is standard forward
viz.row_statistics(trace(direction="backward"), Q, K) -> UnsupportedError: flash2 backward
viz.row_statistics(trace(), Q, K, row=96) -> OptionError: row must be from 0 to 95, got 96
viz.row_statistics(trace(), Q[:, :5], K)
    -> ShapeError: q must be the array of the traced run, of shape (..., 96, 8)
palette.color("W") -> OptionError: unknown tensor 'W'; choose from Q, K
palette.color("Q", "dusk") -> OptionError: unknown theme 'dusk'; choose from light, dark
""")


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_cannot_be_drawn_says_why(call, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(call, said, {**globals(), **MODULES, "palette": palette, "Steps": Steps})
    assert not list(tmp_path.iterdir())
