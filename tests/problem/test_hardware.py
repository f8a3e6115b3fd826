"""`Device`: presets that are consistent with what their chips are made of, and a user's own."""

import pickle
import re
from dataclasses import replace

import pytest

from flashsim import Device, OptionError
from flashsim.problem import hardware
from flashsim.problem.hardware import KIB, PRESETS

# What the data sheets say about the chip itself: FP32 lanes an SM, boost clock in GHz.
LANES_AND_CLOCK = {
    "V100": (64, 1.530),
    "T4": (64, 1.590),
    "A100": (64, 1.410),
    "A100-80GB": (64, 1.410),
    "RTX 3090": (128, 1.695),
    "RTX 4090": (128, 2.520),
    "RTX 4000 Ada": (128, 2.175),
    "L40S": (128, 2.520),
    "H100": (128, 1.980),
    "H200": (128, 1.980),
    "B200": (128, 1.965),
}
# CUDA C++ Programming Guide, compute capability: KiB of shared memory a block, and an SM.
SHARED_KIB = {
    (7, 0): (96, 96),
    (7, 5): (64, 64),
    (8, 0): (163, 164),
    (8, 6): (99, 100),
    (8, 9): (99, 100),
    (9, 0): (227, 228),
    (10, 0): (227, 228),
}


@pytest.mark.parametrize("name", LANES_AND_CLOCK)
def test_fp32_peak_is_lanes_times_clock(name):
    device = PRESETS[name]
    lanes, clock = LANES_AND_CLOCK[name]

    assert device.cuda_flops["float32"] == pytest.approx(
        2 * device.sm_count * lanes * clock * 1e9, rel=0.01
    )


def test_every_preset_is_checked_above():
    assert set(PRESETS) == set(LANES_AND_CLOCK)


@pytest.mark.parametrize("device", PRESETS.values(), ids=lambda d: d.name)
def test_shared_memory_follows_the_compute_capability(device):
    block, sm = SHARED_KIB[device.compute_capability]

    assert (device.sram_bytes, device.sram_per_sm) == (block * KIB, sm * KIB)
    assert device.registers_per_sm == 65_536 * 4


@pytest.mark.parametrize("device", PRESETS.values(), ids=lambda d: d.name)
def test_levels_get_faster_and_smaller_towards_the_cores(device):
    assert device.sram_per_sm < device.l2_bytes < device.hbm_bytes
    assert device.l2_bandwidth == 0 or device.l2_bandwidth > device.hbm_bandwidth
    assert device.peak("float16") > device.peak("float32", tensor_cores=False)
    assert device.peak("float32") > device.peak("float64", tensor_cores=False)


@pytest.mark.parametrize("device", PRESETS.values(), ids=lambda d: d.name)
def test_every_figure_has_a_source_that_the_module_lists(device):
    listed = set(re.findall(r"^ \[([A-Z])\]", hardware.__doc__, re.M))
    cited = set(re.findall(r"\[([A-Z])\]", device.source))

    assert cited
    assert cited <= listed
    assert ("L2 bandwidth not published" in device.source) == (device.l2_bandwidth == 0)


@pytest.mark.parametrize("name", ["RTX 4000 Ada", "rtx4000ada", "rtx-4000-ada", "RTX_4000_ADA"])
def test_names_forgive_case_and_separators(name):
    assert Device.get(name) is PRESETS["RTX 4000 Ada"]


def test_a_device_stands_for_itself():
    mine = Device("mine", sram_bytes=1000, sram_per_sm=2000)

    assert Device.get(mine) is mine
    assert Device.get("A100-40GB") is PRESETS["A100"]


@pytest.mark.promise("refuses bad input")
def test_unknown_devices_are_refused():
    with pytest.raises(OptionError, match=r"unknown device 'H100 \?'; .*did you mean 'H100'"):
        Device.get("H100 ?")
    with pytest.raises(OptionError, match=r"unknown device 7; choose from V100, T4, "):
        Device.get(7)


def test_peaks_and_ridge():
    a100 = Device.get("A100")

    assert a100.peak("bfloat16") == 312e12
    assert a100.peak("float32") == 19.5e12  # no tensor core takes float32
    assert a100.peak("float16", tensor_cores=False) == 78e12
    assert a100.ridge("float16") == pytest.approx(312e12 / 1555e9)


def test_frozen_hashable_and_equal_by_value():
    h100 = Device.get("H100")

    assert replace(h100, name="other") != h100
    assert replace(h100) == h100
    assert hash(replace(h100)) == hash(h100)
    with pytest.raises(TypeError):
        h100.tensor_flops["float32"] = 1.0


@pytest.mark.parametrize("device", [*PRESETS.values(), Device("mine", 1, 2)], ids=lambda d: d.name)
def test_pickle_and_dict_give_the_same_device_back(device):
    assert pickle.loads(pickle.dumps(device)) == device
    again = Device(**device.to_dict())
    assert again == device
    assert hash(again) == hash(device)


def test_another_capacity():
    small, large = Device.get("H100").with_sram(4096), Device.get("H100").with_sram(10**6)

    assert (small.sram_bytes, small.sram_per_sm) == (4096, 228 * KIB)
    assert (large.sram_bytes, large.sram_per_sm) == (10**6, 10**6)
    assert small.name == "H100 (M = 4,096 B)"
    assert small.hbm_bandwidth == Device.get("H100").hbm_bandwidth


@pytest.mark.promise("refuses bad input")
@pytest.mark.parametrize("field", ["sram_bytes", "sram_per_sm", "sm_count", "l2_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "96"])
def test_capacities_are_positive_integers(field, value):
    with pytest.raises(OptionError, match=rf"Device.{field} must be a positive integer, got "):
        replace(Device.get("H100"), **{field: value})


@pytest.mark.promise("refuses bad input")
@pytest.mark.parametrize(
    "value", [7, (2, 66), ((2, 66, 1),), ((2, 0),), ((2, 1.5),), "ab", [[2], 4]]
)
def test_clusters_are_pairs_of_positive_integers(value):
    with pytest.raises(OptionError, match=r"Device.clusters must list pairs of positive integers"):
        replace(Device.get("H100"), clusters=value)
    assert replace(Device.get("H100"), clusters=[[2, 66]]).clusters == ((2, 66),)
