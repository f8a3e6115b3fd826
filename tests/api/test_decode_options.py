"""`DecodeOptions`: the options of decoding in one object say the same as keywords, everywhere."""

from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses

import flashsim
from flashsim import DecodeOptions, Problem
from flashsim.studies.predict import predict

pytestmark = pytest.mark.promise("refuses bad input")

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, 1, 16), np.float32)
K, V = RNG.standard_normal((2, 2, 2, 96, 16), np.float32)
POOL = RNG.standard_normal((8, 2, 24, 16), np.float32)
TABLE = np.arange(8).reshape(2, 4)
P = Problem(1, 96, 16, batch=2, heads=4, kv_heads=2)
LONG = Problem(1, 4096, 64, batch=2, heads=4, kv_heads=2, dtype="float16")
HOW = {"algorithm": "flash-decode"}
USUAL = DecodeOptions()


@pytest.mark.parametrize(
    ("arrays", "problem", "fields"),
    [
        ((K, V), P, {}),
        ((K, V), P, {"splits": 3, "pack_gqa": False, "cache_seqlens": (96, 40)}),
        ((K, V), P, {"splits": "fa3", "cache_seqlens": np.array([7, 40])}),
        ((POOL, POOL), Problem(**vars(P) | {"page_size": 24}), {"block_table": TABLE}),
        (
            (K[:1].repeat(2, 0), V[:1].repeat(2, 0)),
            P,
            {"shared_prefix": 48, "cache_seqlens": [60, 96]},
        ),
        ((K, None), Problem(**vars(P) | {"head_dim_v": 8, "latent": True}), {"head_dim_v": 8}),
    ],
)
def test_one_object_says_what_the_keywords_say(arrays, problem, fields):
    decode = DecodeOptions(**fields)
    assert {*decode.keywords()} == {*fields}
    ours = flashsim.run(Q, *arrays, decode=decode, trace=True, **HOW)
    theirs = flashsim.run(Q, *arrays, trace=True, **HOW, **fields)
    np.testing.assert_array_equal(ours.out, theirs.out)
    counted = flashsim.count(problem, decode=decode, **HOW)
    for op in ("load", "store"):
        assert ours.trace.bytes(op) == theirs.trace.bytes(op) == counted.bytes(op) > 0
    fewer = {name: x for name, x in fields.items() if name not in ("block_table", "head_dim_v")}
    assert flashsim.count(problem, **HOW, **fewer).bytes() == counted.bytes()


def test_the_other_algorithms_of_a_comparison_do_not_get_it():
    how = {"algorithms": ["flash2", "flash-decode"]}
    one = flashsim.compare(Q, K, V, decode=DecodeOptions(splits=3), **how)
    assert one.table().rows == flashsim.compare(Q, K, V, splits=3, **how).table().rows
    assert one.table().rows[1][-1] < 1e-6


def test_a_prediction_takes_the_splits_and_the_lengths():
    decode = DecodeOptions(splits=4, cache_seqlens=[4096, 1024])
    offsets = {"cu_seqlens_q": (0, 1, 2), "cu_seqlens_k": (0, 4096, 5120)}
    packed = Problem(2, 5120, 64, heads=4, kv_heads=2, dtype="float16", **offsets)
    ours, theirs = predict(LONG, decode=decode, **HOW), predict(packed, splits=4, **HOW)
    assert ours.seconds == theirs.seconds
    loaded = [x.traffic.bytes("load", "K") for x in (ours, theirs, predict(LONG, **HOW))]
    assert loaded[0] == loaded[1] < loaded[2]


def test_a_prediction_of_what_the_decode_kernel_packs():
    assert predict(LONG, pack_gqa=True, **HOW).seconds == predict(LONG, **HOW).seconds
    alone = replace(LONG, kv_heads=LONG.heads)  # nothing to pack
    assert predict(alone, pack_gqa=False, **HOW).seconds == predict(alone, **HOW).seconds


def test_lengths_on_a_gpu_are_not_read():
    class OnGpu:
        shape, dtype = (2,), "int32"

    lengths = OnGpu()
    assert DecodeOptions(cache_seqlens=lengths).keywords() == {"cache_seqlens": lengths}


test_what_cannot_be_is_refused = refuses(r"""
DecodeOptions(split=3) -> UnknownArgumentError: did you mean 'splits'
DecodeOptions(splits=0) -> OptionError: splits= must be an integer
DecodeOptions(splits="fa4") -> OptionError: unknown splits='fa4'
DecodeOptions(pack_gqa=1) -> DTypeError: pack_gqa must be True or False
DecodeOptions(shared_prefix=-1) -> ShapeError: shared_prefix must be at least
DecodeOptions(head_dim_v=0) -> ShapeError: head_dim_v must be at least 1
DecodeOptions(cache_seqlens=[1.5]) -> ShapeError: cache_seqlens must be integers
DecodeOptions(cache_seqlens=3) -> ShapeError: cache_seqlens must be integers
DecodeOptions(cache_seqlens=np.ones(2)) -> ShapeError: got an array of float64 of shape (2,)
DecodeOptions(cache_seqlens=TABLE) -> ShapeError: got an array of int64 of shape (2, 4)
DecodeOptions(cache_seqlens=[3, -1]) -> OptionError: cache_seqlens[1] must be at least 0
DecodeOptions(block_table=[[1]]) -> DTypeError: block_table must be an array
DecodeOptions(block_table=np.ones((1, 2)))
    -> DTypeError: block_table must be an array of integers
run(Q, K, V, decode=USUAL) -> OptionError: decode= for 'flash2'
flashsim.backward(*[Q] * 6, decode=USUAL) -> OptionError: decode= for 'flash2'
compare(Q, K, V, decode=USUAL) -> OptionError: decode= for 'standard'
count(P, decode=USUAL) -> OptionError: decode= for 'flash2'
predict(LONG, decode=USUAL) -> OptionError: decode= for 'flash2'
run(Q, K, V, decode=USUAL, splits=2, **HOW) -> OptionError: in addition to decode=
count(P, decode=USUAL, splits=2, **HOW) -> OptionError: in addition to decode=
predict(LONG, decode=USUAL, splits=2, **HOW) -> OptionError: in addition to decode=
run(Q, K, V, decode={}, **HOW) -> DTypeError: flashsim.DecodeOptions
count(P, decode=DecodeOptions(block_table=TABLE), **HOW) -> OptionError: has no page_size
count(P, decode=DecodeOptions(head_dim_v=8), **HOW) -> OptionError: latent=True, head_dim_v=8
predict(LONG, decode=DecodeOptions(pack_gqa=False), **HOW)
    -> UnsupportedError: always packs the query heads ... leave out pack_gqa=
predict(LONG, pack_gqa=False, **HOW)
    -> UnsupportedError: always packs the query heads ... leave out pack_gqa=
predict(LONG, decode=DecodeOptions(shared_prefix=16), **HOW) -> UnsupportedError: shared_prefix
""")
