"""GPU models: the capacity and the bandwidth of each memory level, and the peak compute rates.

Each device cites the sources of its figures by letter:

 [V] NVIDIA Tesla V100 GPU Architecture whitepaper (WP-08608), tables 1 and 4.
 [T] NVIDIA Turing GPU Architecture whitepaper (WP-09183), appendix on the Tesla T4.
 [A] NVIDIA A100 Tensor Core GPU Architecture whitepaper, tables 1, 4 and 5; A100 datasheet (80 GB).
 [G] NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A (GeForce RTX 3090).
 [L] NVIDIA Ada GPU Architecture whitepaper, appendix A (GeForce RTX 4090).
 [W] NVIDIA RTX 4000 Ada Generation datasheet: SMs, memory, FP32 peak; AD104's 48 MiB of L2.
 [S] NVIDIA L40S datasheet; L2 size of the full AD102 from [L].
 [H] NVIDIA H100 Tensor Core GPU Architecture whitepaper, tables 1 and 2 (SXM5).
 [I] NVIDIA H200 datasheet for its memory; peaks from [H]; L2 size as the device reports it.
 [B] NVIDIA DGX B200 datasheet (1,440 GB and 64 TB/s over eight GPUs), NVIDIA's table of HGX B200,
     one GPU: FP64 37 (tensor cores 37), FP32 75, FP16 4,500, FP8 9,000 TFLOP/s with sparsity; SM
     count and L2 size as the device reports them. Other documents differ: the Blackwell brief of
     2024 prints FP64 40 and FP32 80, and HGX tables of 2025 print 7.7 TB/s.
 [C] CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory
     per SM and per block (opt-in), registers per SM; and "Arithmetic Instructions", from whose
     rates the FP64, FP16 and BF16 peaks of CUDA cores follow if a whitepaper leaves them out.
 [J] L2 read bandwidth measured by Jia et al.: V100 2155 GB/s, arXiv:1804.06826; T4,
     arXiv:1903.07486 (the T4's figure was entered from memory and not checked in the paper).
 [E] L2 read bandwidth measured by github.com/RRZE-HPC/gpu-benches, `gpu-l2-cache`, median of the
     data sets from 8 to 30 MB: A100 80 GB 5.4 TB/s, L40 5.2, H200 9.8. Entered also for the chips
     with the same die and SM count: A100 40 GB, L40S, H100.
 [K] Clusters that run at once, as CUDA's cuOccupancyMaxActiveClusters says on an H100 SXM5 and an
     H200. Others may group their SMs differently. The figures of the B200 are unknown.

FP8 peaks are the dense peaks of the documents [L], [W], [S], [H] and [B]. The FP8 peaks were
entered from memory, and not checked in these documents. Copies of the documents' tables on other
websites confirm the FP8 peaks of the H100 (3,957.8 with sparsity), L40S (733 and 1,466), RTX 4000
Ada (427.6 with sparsity) and B200 (9,000 with sparsity). For the RTX 4090's FP8 peak, websites
print both 330.3 and 660.6 TFLOP/s. This module uses 330.3 TFLOP/s, the peak with float32
accumulation, as for the card's FP16.

A data sheet's "GB" of off-chip memory is read as GiB, because an H200 "of 141 GB" reports 143,771
MiB, while 141 GB are 134,468 MiB. Peaks of matrix products are *dense*, with float32 accumulation,
at boost clock; a data sheet's figure "with sparsity" is halved. If a device lists no peak for a
dtype, the GPU has no hardware unit for that dtype. A bandwidth of 0 means that no figure is
published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from flashsim import report
from flashsim.errors import DTypeError, OptionError, choices, own_errors, shown
from flashsim.problem import checks

KIB = 1024
MIB = 1024 * KIB
#: Fields that count bytes or SMs, and their largest value, with which sums of them fit in 64 bits.
_COUNTS = ("sram_bytes", "sram_per_sm", "registers_per_sm", "sm_count", "l2_bytes", "hbm_bytes")
MOST = 2**60


@own_errors
@dataclass(frozen=True)
class Device:
    """A GPU: capacities in bytes, bandwidths in bytes/s, peaks in FLOP/s (a multiply-add is 2).

    Parameters
    ----------
    name : str
        The name in tables and plots.
    sram_bytes : int
        The largest shared memory of one thread block; simulated algorithms must fit in it.
    sram_per_sm, registers_per_sm : int
        Shared memory and register file of one SM.
    sm_count : int
        Streaming multiprocessors.
    l2_bytes, hbm_bytes : int
        L2 cache and off-chip memory.
    l2_partitions : int
        1, or 2 if L2 has two halves, each of which serves the nearer SMs and memory [A], [H].
    hbm_bandwidth, l2_bandwidth : float
        `l2_bandwidth` is 0 if no measurement is published.
    tensor_flops, cuda_flops : mapping of str to float
        Peaks by input dtype on tensor cores (dense) and on CUDA cores.
    compute_capability : tuple of int
        For example ``(9, 0)``.
    source : str
        The source of the figures.
    link : str
        The link to other GPUs of the same host: a name in `flashsim.problem.links.LINKS`, or "".
    clusters : tuple of pairs of int
        Thread blocks per cluster, and how many such clusters run at once with one block per SM; ()
        if that is not known. Planned launches then use a share of the SMs per cluster size.

    Raises
    ------
    OptionError, DTypeError
        If a capacity or a bandwidth is not positive, or a field has the wrong type.
    """

    name: str
    sram_bytes: int
    sram_per_sm: int
    registers_per_sm: int = 256 * KIB
    sm_count: int = 1
    l2_bytes: int = MIB
    l2_partitions: int = 1
    hbm_bytes: int = 1 << 30
    hbm_bandwidth: float = 1e12
    l2_bandwidth: float = 0.0
    tensor_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    cuda_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    compute_capability: tuple[int, int] = (0, 0)
    source: str = "user"
    link: str = ""
    clusters: tuple[tuple[int, int], ...] = ()

    _repr_html_ = report.card

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        for name in ("name", "source", "link"):
            if not isinstance(getattr(self, name), str):
                raise DTypeError(
                    f"Device.{name} must be a string, got {shown(getattr(self, name))}"
                )
        for name in _COUNTS:
            value = getattr(self, name)
            if not checks.is_int(value) or value <= 0:
                raise OptionError(f"Device.{name} must be a positive integer, got {shown(value)}")
            if value > MOST:
                raise OptionError(f"Device.{name} must be at most 2**60, got {shown(value)}")
            put(name, int(value))
        if not checks.is_int(self.l2_partitions) or self.l2_partitions not in (1, 2):
            raise OptionError(
                f"Device.l2_partitions must be 1 or 2, got {shown(self.l2_partitions)}"
            )
        for name in ("hbm_bandwidth", "l2_bandwidth"):
            put(name, checks.number(f"Device.{name}", getattr(self, name), low=0.0))
        if self.hbm_bandwidth == 0:
            raise OptionError("Device.hbm_bandwidth must be positive, got 0")
        for name in ("tensor_flops", "cuda_flops"):
            put(name, _peaks(name, getattr(self, name)))
        version = self.compute_capability
        pair = isinstance(version, (tuple, list)) and len(version) == 2
        if not pair or not all(checks.is_int(x) and x >= 0 for x in version):
            raise OptionError(
                "Device.compute_capability must be a pair of integers such as (9, 0), got "
                f"{shown(version)}"
            )
        put("compute_capability", (int(version[0]), int(version[1])))
        put("clusters", _clusters(self.clusters))

    def __reduce__(self) -> tuple:
        # MappingProxyType cannot be pickled, but sweeps send devices to processes.
        return partial(Device, **self.to_dict()), ()

    def to_dict(self) -> dict:
        """Return all fields as plain values for JSON; `Device(**fields)` builds an equal device."""
        values = dict(vars(self))
        values["tensor_flops"] = dict(self.tensor_flops)
        values["cuda_flops"] = dict(self.cuda_flops)
        values["compute_capability"] = list(self.compute_capability)
        values["clusters"] = [list(pair) for pair in self.clusters]
        return values

    def peak(self, dtype: str, *, tensor_cores: bool = True) -> float:
        """Return the peak FLOP/s for matrix products of `dtype` on tensor cores.

        The result is the peak of CUDA cores if the GPU has no tensor cores for `dtype` or
        `tensor_cores` is False.
        """
        if not isinstance(dtype, str):
            raise DTypeError(f"dtype must be a name such as 'float16', got {shown(dtype)}")
        on_tensor = self.tensor_flops.get(dtype, 0.0) if tensor_cores else 0.0
        peak = on_tensor or self.cuda_flops.get(dtype, 0.0)
        if not peak:
            named = sorted({*self.tensor_flops, *self.cuda_flops})
            instead = f"choose from {choices(dtype, named)}"
            if not named:
                instead = "pass tensor_flops= or cuda_flops= to flashsim.Device, in FLOP/s by dtype"
            raise OptionError(f"{self.name} has no peak for dtype {dtype!r}; {instead}")
        return peak

    def ridge(self, dtype: str) -> float:
        """Return the intensity (FLOPs per HBM byte) above which arithmetic limits the speed."""
        return self.peak(dtype) / self.hbm_bandwidth

    def with_sram(self, sram_bytes: int) -> Device:
        """Return a copy of the device with a new on-chip capacity per block (M in the papers)."""
        sram_bytes = checks.positive_int("sram_bytes", sram_bytes)
        return replace(
            self,
            name=f"{self.name} (M = {sram_bytes:,} B)",
            sram_bytes=sram_bytes,
            sram_per_sm=max(sram_bytes, self.sram_per_sm),
        )

    @classmethod
    def get(cls, device: str | Device) -> Device:
        """Return the preset of that name, or `device` itself if it is a `Device`.

        Upper and lower case, spaces and hyphens in the name do not matter.

        Raises
        ------
        OptionError
            If no preset has that name.
        """
        if isinstance(device, Device):
            return device
        preset = _BY_KEY.get(_key(device)) if isinstance(device, str) else None
        if preset is None:
            raise OptionError(
                f"unknown device {shown(device)}; choose from {choices(device, PRESETS)}; "
                "or build your own with flashsim.Device(...)"
            )
        return preset


def reported(
    name: str, compute_capability: tuple[int, int], sm_count: int, hbm_bytes: int
) -> Device:
    """Return the preset of a GPU, from the name and figures that a driver reports.

    The name is, for example, "NVIDIA H100 80GB HBM3". The driver's `hbm_bytes` are a little less
    than the GPU's capacity.

    Raises
    ------
    OptionError
        If no preset matches, as for a part of a GPU (MIG), or another model with the same name.
    """
    words = " ".join(re.split(r"[^A-Za-z0-9]+", name))
    for preset in PRESETS.values():
        model = re.sub(r"-\d+GB$", "", preset.name)
        if (
            re.search(rf"\b{model}\b", words)
            and preset.compute_capability == tuple(compute_capability)
            and preset.sm_count == sm_count
            and abs(hbm_bytes / preset.hbm_bytes - 1) < 0.1
        ):
            return preset
    major, minor = compute_capability
    raise OptionError(
        f"flashsim has no preset for this machine's GPU, {name!r} (compute capability "
        f"{major}.{minor}, {sm_count} SMs, {hbm_bytes / 2**30:.0f} GiB); choose a GPU with device= "
        f"(or --device), one of: {', '.join(PRESETS)}"
    )


def _peaks(field: str, peaks: Any) -> Mapping[str, float]:
    """Return a read-only mapping from dtype to peak FLOP/s, after checking the names and values."""
    if not isinstance(peaks, Mapping) or not all(isinstance(dtype, str) for dtype in peaks):
        raise DTypeError(
            f"Device.{field} must be a mapping such as {{'float16': 989e12}}, got {shown(peaks)}"
        )
    check = lambda dtype, peak: checks.number(f"Device.{field}[{dtype!r}]", peak, 0.0)  # noqa: E731
    return MappingProxyType({dtype: check(dtype, peak) for dtype, peak in peaks.items()})


def _clusters(pairs: Any) -> tuple[tuple[int, int], ...]:
    """Return pairs (blocks per cluster, clusters at once) as tuples, after checking them."""
    listed = isinstance(pairs, (tuple, list))
    found = [tuple(pair) for pair in pairs if isinstance(pair, (tuple, list))] if listed else []
    counts = all(len(pair) == 2 and all(checks.is_int(x) and x > 0 for x in pair) for pair in found)
    if not listed or len(found) < len(pairs) or not counts:
        raise OptionError(
            "Device.clusters must list pairs of positive integers such as ((2, 66), (4, 30)), got "
            f"{shown(pairs)}"
        )
    return tuple((int(blocks), int(count)) for blocks, count in found)


@cache
def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c not in " -_")


def _tera(**peaks: float) -> dict[str, float]:
    return {dtype: value * 1e12 for dtype, value in peaks.items()}


def _fp8(peak: float) -> dict[str, float]:
    """Return a dict with one peak for both FP8 types, and for products of the two types."""
    return {"float8_e4m3fn": peak, "float8_e5m2": peak}


def _preset(name: str, cc: tuple[int, int], sms: int, sram_kib: tuple[int, int], **rest) -> Device:
    return Device(
        name=name,
        compute_capability=cc,
        sm_count=sms,
        sram_bytes=sram_kib[0] * KIB,
        sram_per_sm=sram_kib[1] * KIB,
        **rest,
    )


# sram_kib = (largest per block, per SM), [C]. Every SM has 64 Ki registers of 4 B [C].
_A100 = _preset(
    "A100", (8, 0), 108, (163, 164), l2_bytes=40 * MIB, hbm_bytes=40 << 30,
    l2_partitions=2, hbm_bandwidth=1555e9, l2_bandwidth=5400e9,
    tensor_flops=_tera(float64=19.5, float16=312, bfloat16=312),
    cuda_flops=_tera(float64=9.7, float32=19.5, float16=78, bfloat16=39),
    source="[A] SXM4 40 GB; L2 bandwidth [E]", link="NVLink 3",
)  # fmt: skip
_H100 = _preset(
    "H100", (9, 0), 132, (227, 228), l2_bytes=50 * MIB, hbm_bytes=80 << 30,
    l2_partitions=2, hbm_bandwidth=3352e9, l2_bandwidth=9800e9,
    tensor_flops=_tera(float64=66.9, float16=989.4, bfloat16=989.4, **_fp8(1978.9)),
    cuda_flops=_tera(float64=33.5, float32=66.9, float16=133.8, bfloat16=133.8),
    source="[H] SXM5; L2 bandwidth [E]; clusters [K]", link="NVLink 4",
    clusters=((2, 66), (4, 30), (8, 15)),
)  # fmt: skip
_ALL = [
    _preset(
        "V100", (7, 0), 80, (96, 96), l2_bytes=6 * MIB, hbm_bytes=32 << 30,
        hbm_bandwidth=900e9, l2_bandwidth=2155e9,
        tensor_flops=_tera(float16=125),
        cuda_flops=_tera(float64=7.8, float32=15.7, float16=31.4),
        source="[V] SXM2, 32 GB; L2 bandwidth [J]", link="NVLink 2",
    ),
    _preset(
        "T4", (7, 5), 40, (64, 64), l2_bytes=4 * MIB, hbm_bytes=16 << 30,
        hbm_bandwidth=320e9, l2_bandwidth=1270e9,
        tensor_flops=_tera(float16=65),
        cuda_flops=_tera(float64=0.254, float32=8.1, float16=16.2),
        source="[T]; L2 bandwidth [J]", link="PCIe 3 x16",
    ),
    _A100,
    replace(
        _A100, name="A100-80GB", hbm_bytes=80 << 30, hbm_bandwidth=2039e9,
        source="[A] SXM4 80 GB; L2 bandwidth [E]",
    ),
    _preset(
        "RTX 3090", (8, 6), 82, (99, 100), l2_bytes=6 * MIB, hbm_bytes=24 << 30,
        hbm_bandwidth=936e9,
        tensor_flops=_tera(float16=71, bfloat16=71),
        cuda_flops=_tera(float64=0.556, float32=35.6, float16=35.6, bfloat16=35.6),
        source="[G]; L2 bandwidth not published", link="NVLink 3 bridge",
    ),
    _preset(
        "RTX 4090", (8, 9), 128, (99, 100), l2_bytes=72 * MIB, hbm_bytes=24 << 30,
        hbm_bandwidth=1008e9,
        tensor_flops=_tera(float16=165.2, bfloat16=165.2, **_fp8(330.3)),
        cuda_flops=_tera(float64=1.29, float32=82.6, float16=82.6, bfloat16=82.6),
        source="[L]; L2 bandwidth not published", link="PCIe 4 x16",
    ),
    _preset(
        "RTX 4000 Ada", (8, 9), 48, (99, 100), l2_bytes=48 * MIB, hbm_bytes=20 << 30,
        hbm_bandwidth=360e9,
        # The data sheet's matrix peak is for FP8. The FP16 peak is 4 x the FP32 peak, as for L40S.
        tensor_flops=_tera(float16=106.9, bfloat16=106.9, **_fp8(213.8)),
        cuda_flops=_tera(float64=0.418, float32=26.7, float16=26.7, bfloat16=26.7),
        source="[W]; L2 bandwidth not published", link="PCIe 4 x16",
    ),
    _preset(
        "L40S", (8, 9), 142, (99, 100), l2_bytes=96 * MIB, hbm_bytes=48 << 30,
        hbm_bandwidth=864e9, l2_bandwidth=5200e9,
        tensor_flops=_tera(float16=362.05, bfloat16=362.05, **_fp8(733)),
        cuda_flops=_tera(float64=1.43, float32=91.6, float16=91.6, bfloat16=91.6),
        source="[S]; L2 bandwidth [E]", link="PCIe 4 x16",
    ),
    _H100,
    replace(
        _H100, name="H200", l2_bytes=60 * MIB, hbm_bytes=141 << 30, hbm_bandwidth=4800e9,
        source="[I] SXM; L2 bandwidth [E]; clusters [K]",
    ),
    _preset(
        "B200", (10, 0), 148, (227, 228), l2_bytes=132_644_864, hbm_bytes=180 << 30,
        l2_partitions=2, hbm_bandwidth=8000e9,
        tensor_flops=_tera(float64=37, float16=2250, bfloat16=2250, **_fp8(4500)),
        cuda_flops=_tera(float64=37, float32=75, float16=150, bfloat16=150),
        source="[B]; L2 bandwidth not published", link="NVLink 5",
    ),
]  # fmt: skip

#: The presets by name.
PRESETS: Mapping[str, Device] = MappingProxyType({device.name: device for device in _ALL})
_BY_KEY = {_key(name): device for name, device in PRESETS.items()}
_BY_KEY["a10040gb"] = PRESETS["A100"]
