"""`flashsim roofline`, `predict`, `study dram`, `study ladder`, ...: figures, printed."""

from pathlib import Path

import pytest
from commands import ok, refused, rows

import flashsim
from flashsim import Problem, Tiling, l2
from flashsim.errors import TraceError
from flashsim.studies import predict, reproduce, roofline
from flashsim.studies.predict import chip
from flashsim.studies.verify import METRICS

pytestmark = pytest.mark.promise("command line equals library")

SIZES = ("-n", 512, "-d", 32, "--heads", 2, "--tiling", "64x64")
PROBLEM = Problem(512, head_dim=32, heads=2, dtype="bfloat16")


def requested(**options):
    return flashsim.count(PROBLEM, tiling=Tiling(64, 64), device="A100", **options)


def test_dram_over_sizes_of_l2_prints_the_curve():
    found = rows("study dram", *SIZES, "--device", "A100", "--l2-sizes", "0.05,1")
    curve = l2.curves(requested())["forward"]
    assert [row["DRAM read B"] for row in found] == [curve.reads(52428), curve.reads(2**20)]


def test_roofline_has_a_row_for_each_algorithm_and_count():
    words = ("roofline", *SIZES, "--device", "A100")
    found = rows(*words)
    flash = [row for row in found if row["algorithm"] == "flash2"]
    assert flash == roofline.roofline(requested()).table().records()
    assert len(found) == 2 * len(flash)
    timed = rows(*words, "-a", "flash2", "--seconds", 1e-3)
    assert timed == roofline.roofline(requested(), seconds=1e-3).table().records()


def test_predict_takes_the_kernels_made_for_the_device():
    for device, kernels in (("RTX 4000 Ada", "portable"), ("H200", "hopper")):
        text = ok("predict", "-n", 1024, "--device", device)
        assert f"{device}, {kernels} kernels" in " ".join(text.split())


def test_reproduce_lists_and_recomputes():
    assert [row["name"] for row in rows("study reproduce")] == list(reproduce.NAMES)
    expected = [row for table in reproduce.tables("tiles") for row in table.records()]
    assert rows("study reproduce", "tiles") == expected
    assert "TFLOP/s" in ok("study reproduce")  # what cannot be derived, for people


def test_reproduce_draws_the_series_of_the_pallas_text(tmp_path):
    out = tmp_path / "series.svg"
    ok("study reproduce", "pallas", "--plot", out)
    assert "T = 4096: 55.3 % of peak" in out.read_text()
    said = refused("study reproduce", "tiles", "--plot", out)
    assert "flashsim study reproduce pallas" in said


def test_claims_print_of_one_the_reason():
    assert "MB by MiB" not in ok("study claims")
    assert "MB by MiB" in " ".join(ok("study claims", "268-times").split())


def test_reproduce_all_recomputes_everything(monkeypatch):
    kept = {name: reproduce.NAMES[name] for name in ("ring", "tiles")}
    monkeypatch.setattr(reproduce, "NAMES", kept)
    output = ok("study reproduce", "all")
    assert "2310.01889" in output
    assert "tile_size.h" in output
    every = [row for name in kept for row in rows("study reproduce", name)]
    assert rows("study reproduce", "all") == every  # one array, not one a name
    assert ok("study reproduce", "all", "--csv").count("why they differ") == 1


@pytest.fixture
def counters(tmp_path):
    """A table of Nsight Compute: the forward read exactly what is predicted."""
    nbytes = requested().bytes("load")
    path = tmp_path / "ncu.csv"
    path.write_text(
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        f'"0","flash_forward","{METRICS["bytes into SMs"]}","byte","{nbytes:,}"\n'
    )
    return path


def test_verify_reads_a_saved_table(counters):
    found = rows("verify", "--from", counters, *SIZES, "--batch", 1, "--device", "A100")
    loads, tables = requested().bytes("load"), 2 * 8 * 2 * 32  # two sectors for each row tile
    assert found == [
        {
            "kernel": "forward",
            "quantity": "requested read",
            "predicted": loads + tables,
            "counted": None,
            "measured": loads,
            "measured / predicted": pytest.approx(loads / (loads + tables)),
        }
    ]


def test_a_saved_table_needs_the_tiles_and_the_gpu_that_ran(counters, tmp_path):
    assert "pass --tiling" in refused("verify", "--from", counters)
    assert "--from needs --device" in refused("verify", "--from", counters, *SIZES)
    assert "none.csv" in refused("verify", "--from", tmp_path / "none.csv", *SIZES)


def test_calibrate_reads_units_and_names_a_device():
    """The H200's own units give the H200's data sheet back."""
    kept = Path(__file__).parents[2] / "docs" / "data" / "units-h200.csv"
    found = {row["unit"]: row["value"] for row in rows("study calibrate", "--units", kept)}
    sheet = flashsim.Device.get("H200")
    assert found["exponentials"] == pytest.approx(16, rel=1e-3)
    assert found["Device.tensor_flops, bfloat16"] == pytest.approx(sheet.peak("bfloat16"), rel=1e-4)
    assert found["Device.hbm_bandwidth"] == pytest.approx(sheet.hbm_bandwidth, rel=1e-4)
    assert found["Device.l2_bandwidth"] == pytest.approx(sheet.l2_bandwidth, rel=1e-4)


def test_a_chip_with_half_of_an_h200s_units_is_half_as_fast():
    whole = {"mma.sync": 4096.4, "multiply-adds": 124.37, "HBM reads": 4.45995e12}
    whole |= {"L2 reads": 8.85999e12}
    half = {name: value / 2 for name, value in whole.items()} | {"SM clock": 1.97028e9}
    device = chip.calibrated(flashsim.Device.get("H200"), half)
    p = Problem(2048, head_dim=128, heads=16, dtype="bfloat16")
    (slow,), (fast,) = (
        predict.predict(p, kernels="hopper", device=x).stages for x in (device, "H200")
    )
    for unit, seconds in fast.units.items():
        assert slow.units[unit] == pytest.approx(2 * seconds, rel=1e-4)
    with pytest.raises(TraceError, match="no row whose name begins with 'L2 reads'"):
        chip.rates({k: v for k, v in half.items() if k != "L2 reads"})
