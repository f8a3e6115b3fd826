"""Decoding on the command line: splits, pages, shared prefixes, latent attention, the models."""

import dataclasses

import numpy as np
import pytest
from commands import invoke, rows

from flashsim import Problem, Tiling, count
from flashsim.problem.hardware import PRESETS
from flashsim.schedule.split_kv import fill
from flashsim.studies.predict import predict

pytestmark = pytest.mark.promise("command line equals library")

SIZES = ("-a", "flash-decode", "-n", 1, "--n-kv", 64, "-b", 2, "--heads", 4, "--kv-heads", 2)
P = Problem(1, 64, 64, batch=2, heads=4, kv_heads=2)


def values(*words):
    """The values that a command prints of the forward pass, by quantity and of what."""
    found = (row for row in rows(*words) if row["direction"] == "forward")
    return {(row["quantity"], row["of"]): row["value"] for row in found}


@pytest.mark.parametrize("more", [(), ("--page-size", 8), ("--no-pack-gqa", "--splits", 3)])
def test_run_moves_what_count_counts(more):
    prefix = ("--shared-prefix", 16, "-t", "8x8", *more)
    ran, counted = (values(c, *SIZES, *prefix) for c in ("run", "count"))
    tensors = [("load", name) for name in ("Q", "K", "V", "O_part")] + [("store", "O_part")]
    if "--page-size" in more:
        tensors.append(("load", "table"))
    for key in tensors:
        assert ran[key] == counted[key] > 0, key
    assert "16 of the keys shared" in " ".join(invoke("count", *SIZES, *prefix).stdout.split())


@pytest.mark.parametrize("packs", [True, False])
def test_flash2_packs_query_heads_on_request(packs):
    how = (*SIZES[2:], "-n", 24, "-t", "16x16", "--pack-gqa" if packs else "--no-pack-gqa")
    problem = Problem(24, 64, 64, batch=2, heads=4, kv_heads=2)
    expected = count(problem, tiling=Tiling(16, 16), pack_gqa=packs)
    for command in ("run", "count"):
        found = values(command, *how, "--backward")
        assert all(found["load", name] == expected.bytes("load", name) for name in "QKV")
    took = rows("predict", *how[:-3], "-d", 64, "--dtype", "bfloat16", how[-1])
    expected = predict(dataclasses.replace(problem, dtype="bfloat16"), pack_gqa=packs)
    assert took == expected.table().records()


def test_a_real_models_keys_lie_in_pages_too(tmp_path):
    for page_size in (None, 48):
        pages = () if page_size is None else ("--page-size", page_size)
        rows("run", "--demo-data", "layer0", "-a", "flash-decode", *pages, "--out", tmp_path / "o")
        with np.load(tmp_path / "o") as stored:
            out = stored["out"].reshape(12, 512, 32)
        if page_size is None:
            plain = out
    np.testing.assert_array_equal(out, plain)


def test_latent_attention_loads_no_v():
    how = (*SIZES[:-2], "--kv-heads", 1, "-d", 24, "--head-dim-v", 16, "--latent")
    for command in ("run", "count"):
        text = invoke(command, *how).stdout
        assert "V in K" in " ".join(text.split())
        assert not any(line.startswith("V ") for line in text.splitlines())


@pytest.mark.parametrize("cache", [("--page-size", 24), ("--latent", "--head-dim-v", 16)])
def test_compare_gives_the_others_the_same_keys(cache):
    how = (*SIZES[2:-2], "--kv-heads", 1, "-d", 24, "--splits", 2, *cache)
    plain, decoded = rows("compare", "-a", "flash2,flash-decode", *how, "--execute")
    assert decoded["max |diff|"] < 1e-6
    assert plain["load B"] > decoded["load B"]


def test_titles_say_how_many_splits():
    for given, made in ((1, "1 split,"), (3, "3 splits,"), (1000, "4 splits,")):
        how = ("--splits", given, "-t", "4x16")
        for command in ("run", "count"):
            assert made in " ".join(invoke(command, *SIZES, *how).stdout.split())


def test_devices_say_how_many_blocks_fill_them():
    found = rows("study devices", *SIZES[2:], "--splits", "fa3")
    for row, device in zip(found, PRESETS.values(), strict=True):
        f = fill(P, device, splits="fa3")
        assert (row["blocks to fill it"], row["blocks"]) == (f.needed, f.blocks)
    shared = rows("study devices", *SIZES[2:], "--shared-prefix", 32)
    assert len(shared) == len(PRESETS)
    assert shared[0]["row tiles"] > found[0]["row tiles"] // 2


def test_the_models_know_it():
    how = (*SIZES, "--dtype", "bfloat16", "-d", 64, "--device", "H200")
    points = rows("roofline", "-a", "flash2,flash-decode", *how[2:], "--splits", 1)
    assert {p["algorithm"] for p in points} == {"flash2", "flash-decode"}
