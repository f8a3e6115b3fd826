"""What the studies refuse, in their words."""

import numpy as np
import pytest
from refusals import refusals, refused

import flashsim
from flashsim import Device, Problem, Tiling, functions
from flashsim.distributed import count as spread_out
from flashsim.exercises.shelf import get
from flashsim.problem.links import Link
from flashsim.studies import reproduce

pytestmark = pytest.mark.promise("refuses bad input")

#: Modules of flashsim that the calls name.
MODULES = {
    name: getattr(flashsim, name)
    for name in ("banks", "blocks", "claims", "ladder", "precision", "predict", "roofline",
                 "softmax_matmul", "walkthrough")
}  # fmt: skip
HERE = {"functions": functions, "get": get, "Link": Link, "reproduce": reproduce}
HERE |= {"spread_out": spread_out}
LAYER = Problem(1024, head_dim=64, heads=8, dtype="bfloat16")
LONG = Problem(4096, head_dim=128, batch=4, heads=16, dtype="bfloat16")
FP8 = Problem(4096, head_dim=128, batch=4, heads=16, dtype="float8_e4m3fn", scales=(64, 128))
CACHE = Problem(1, 131_072, 128, heads=32, kv_heads=8, dtype="bfloat16")
PACKED = {"cu_seqlens_q": (0, 8), "cu_seqlens_k": (0, 8)}
UNLINKED = Device(**{**Device.get("H200").to_dict(), "link": ""})
NOWHERE = Device("none", 1 << 20, 1 << 20)
WIDE = np.zeros((2, 300, 300), "f4")
X, V = np.zeros((2, 4, 4), "f4"), np.zeros((2, 4, 3), "f4")


def time(problem=LONG, **options):
    return flashsim.predict.predict(problem, **options)


def decoded(problem=CACHE, **options):
    return time(problem, algorithm="flash-decode", **options)


def roof(device="H100"):
    return flashsim.count(Problem(64, head_dim=8), tiling=Tiling(16, 16), device=device)


def laboratory(**options):
    return flashsim.precision.laboratory(
        (32,), **{"kinds": ("normal",), "points": ("o",)} | options
    )


REFUSED = refusals(r"""
banks.access(pattern="diagonal") -> OptionError: unknown pattern
banks.access(layout="morton") -> OptionError: unknown layout
banks.access(pattern="ldmatrix", dtype="float32") -> OptionError: elements of 2 bytes
banks.access(pattern="row", columns=16) -> OptionError: use more columns
banks.access(pattern="ldmatrix", layout="padded", pad=1) -> OptionError: multiple of 8 elements
banks.access(layout="swizzle", columns=40) -> OptionError: a multiple of 32
banks.access(pattern="row-16B", layout="xor") -> OptionError: use the layout 'swizzle'
blocks.sizes(LAYER, (1024,)).best("forward") -> OptionError: no tile of stage 'forward' fits
blocks.sizes(LAYER, ()) -> OptionError: at least one tile size
blocks.mixed(Problem(96, head_dim=16, heads=2), {"dq": Tiling(16, 16)})
    -> OptionError: must have exactly the stages dkdv, dq as keys, got dq
predict.least(flashsim.count(LAYER, algorithm="flash-decode", splits=2))
    -> OptionError: splits keys
predict.when(LAYER, ()) -> OptionError: lengths= must contain at least one
claims.table("268-time") -> OptionError: did you mean '268-times'
reproduce.tables("rings") -> OptionError: did you mean 'ring'
ladder.climb(8, 8, rungs=["onlin"]) -> OptionError: did you mean 'online'
laboratory().of("lse") -> OptionError: there are no results for the rounding point 'lse'
laboratory(kinds=("large",)) -> OptionError: unknown kind of input 'large'
laboratory(points=("m_hbm",)) -> OptionError: unknown rounding point 'm_hbm'
precision.laboratory(256) -> OptionError: n must be a sequence of lengths
precision.laboratory("256") -> OptionError: n must be a sequence of lengths
precision.laboratory(()) -> OptionError: n must be a sequence of lengths
precision.presets("256") -> DTypeError: n must be an integer
walkthrough.softmax([]) -> OptionError: logits must be
walkthrough.softmax([1.0] * 65) -> OptionError: logits must be
walkthrough.softmax([np.inf]) -> OptionError: logits must be
walkthrough.tiles(row=32) -> OptionError: row must be from 0 to 31
walkthrough.tiles(5000) -> OptionError: at most 4096
roofline.roofline(roof(), seconds=0.0) -> OptionError: seconds must be positive
roofline.roofline(roof(), measured_bytes=-1) -> OptionError: measured_bytes
roofline.roofline(roof(NOWHERE)) -> OptionError: no peak for dtype 'float32'
roofline.roofline(roof())["measured"] -> OptionError: unknown roofline point 'measured'
softmax_matmul.run([[1.0]], V) -> DTypeError: x must be an array, got list
softmax_matmul.run(np.zeros((2, 4, 4)), V) -> DTypeError: x must be float32, got float64
softmax_matmul.run(np.zeros((4, 4), "f4"), V) -> ShapeError: x must be (batch, rows, columns)
softmax_matmul.run(X, np.zeros((2, 5, 3), "f4")) -> ShapeError: got (2, 5, 3)
softmax_matmul.run(X, np.zeros((2, 4, 513), "f4")) -> ShapeError: at most 512 columns
softmax_matmul.run(X, V, backend="torch") -> OptionError: unknown backend
softmax_matmul.run(WIDE, WIDE[..., :3].copy(), device="T4", block=300) -> SramOverflow: holds
time(kernels="hoper") -> OptionError: did you mean 'hopper'
time(algorithm="flash1") -> OptionError: time of 'flash1' cannot be predicted
time(algorithm="standard", kernels="hopper")
    -> OptionError: cannot be used: the time of standard attention
time(direction="sideways") -> OptionError: unknown direction
time(device="A100", kernels="hopper") -> UnsupportedError: compute capability 9.0
time(heads_in_group={"forwrd": 2})
    -> OptionError: unknown stage in heads_in_group= 'forwrd'; choose from forward
time(heads_in_group={"forward": 0})
    -> OptionError: at least 1 for every stage, got 0 for 'forward'
time(heads_in_group={"forward": True}) -> DTypeError: got True for 'forward'
time(heads_in_group={"forward": 1.5}) -> DTypeError: got 1.5 for 'forward'
time(FP8, direction="backward") -> UnsupportedError: no backward pass
time(FP8, kernels="portable") -> UnsupportedError: float16 or bfloat16
time(FP8, algorithm="standard") -> UnsupportedError: float16 or bfloat16
time(Problem(8, dtype="bfloat16", **PACKED), algorithm="standard")
    -> UnsupportedError: are packed; use batch
time(Problem(64, head_dim=64, dtype="bfloat16", score_mod=functions.alibi(1)))
    -> UnsupportedError: time of a score function ... use flashsim.count
time(Problem(64, dtype="bfloat16", score_mod=functions.alibi(1)), algorithm="standard")
    -> UnsupportedError: time of a score function ... use flashsim.count
time(splits=4) -> OptionError: 'flash2' cannot split keys
time(Problem(512, head_dim=64, dtype="float16"), direction="backward", algorithm="flash2-once",
    device="H100") -> UnsupportedError: exactly one tile of 128 keys
time(deterministic=False) -> OptionError: direction='backward'
decoded(tiling=Tiling(16, 16)) -> OptionError: leave out tiling=
decoded(kernels="hopper") -> OptionError: leave out kernels=
decoded(splits="fa3") -> OptionError: decode kernel does not support splits='fa3'
decoded(Problem(2, 9, dtype="bfloat16", cu_seqlens_q=(0, 1, 2), cu_seqlens_k=(4, 6, 9),
    shared_prefix=4)) -> UnsupportedError: with shared_prefix cannot be predicted
decoded(Problem(3, 9, dtype="bfloat16", cu_seqlens_q=(0, 1, 3), cu_seqlens_k=(0, 6, 9)))
    -> UnsupportedError: same number of queries for every
decoded(Problem(1, 64)) -> UnsupportedError: supports float16 and bfloat16
decoded(Problem(1, 2**31, dtype="bfloat16"))
    -> UnsupportedError: numbers keys with 32-bit integers
decoded(direction="backward") -> UnsupportedError: no backward pass
predict.spread(LAYER, ranks=2, device=UNLINKED)
    -> OptionError: has no preset link between GPUs; pass link=
predict.spread(LAYER, ranks=4, algorithm="flash-decode")
    -> UnsupportedError: only for a few queries ... algorithm='flash2'
Link.get("NVlink 4") -> OptionError: did you mean 'NVLink 4'
Link.get(7) -> OptionError: unknown link 7
Link("none", 0.0) -> OptionError: bandwidth must be positive
Link("early", 1.0, -1.0) -> OptionError: latency must be finite and at least 0
spread_out(Problem(64, heads=4), ranks=4, scheme="ulysses").rows_to_hide(1.0, 1.0)
    -> OptionError: sends nothing while it computes
get("nowhere/y.py") -> OptionError: the file does not exist
""")


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_cannot_be_studied_says_why(call, said):
    refused(call, said, {**globals(), **MODULES, **HERE})
