"""Links between GPUs, with their specified bytes per second in each direction.

Each link cites the sources of its figures by letter. The module `hardware` explains all letters
that are not listed below.

 [V], [A], [H] NVLink 2, 3, 4: 6, 12 and 18 links of 25 GB/s per direction.
 [N] NVIDIA, "NVLink and NVLink Switch" (nvidia.com/en-us/data-center/nvlink): fifth generation,
     18 links, 1,800 GB/s both directions together.
 [G] GeForce RTX 3090: four third-generation links of 14.0625 GB/s per direction.
 [P] PCI-SIG, PCI Express Base Specification: 8, 16, 32 GT/s per lane, 128b/130b, 16 lanes.
 [Q] InfiniBand Trade Association roadmap: HDR, NDR, XDR, four lanes: 200, 400, 800 Gb/s.
 [X] The H800 is an H100 with 400 GB/s of NVLink instead of 900, both directions together
     ("Insights into DeepSeek-V3", arXiv:2505.09343, on the H800 node).
 [R] Table 2 of Ring attention (arXiv:2310.01889) assumes one 100 Gb/s InfiniBand port per GPU.

Real messages are slower than specified. For example, two H200s exchanged 256 MiB through NCCL at
285 GB/s per direction, while NVLink's specification says 450 GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flashsim.errors import OptionError, choices, own_errors, shown
from flashsim.problem import checks


@own_errors
@dataclass(frozen=True)
class Link:
    """A link that connects one GPU to more GPUs.

    Parameters
    ----------
    bandwidth : float
        Bytes per second per direction; both directions work at once.
    latency : float
        Seconds before the first byte of a message arrives.

    Raises
    ------
    OptionError, DTypeError
        If the bandwidth is not positive, the latency is negative, or a field has the wrong type.
    """

    name: str
    bandwidth: float
    latency: float = 0.0
    source: str = "user"

    def __post_init__(self) -> None:
        for name in ("bandwidth", "latency"):
            number = checks.number(f"Link.{name}", getattr(self, name), low=0.0)
            object.__setattr__(self, name, number)
        if self.bandwidth == 0:
            raise OptionError("Link.bandwidth must be positive, got 0")

    @classmethod
    def get(cls, link: str | Link) -> Link:
        """Return the preset of that name, or `link` itself if it is a `Link`.

        Raises
        ------
        OptionError
            If no preset has that name.
        """
        if isinstance(link, Link):
            return link
        preset = LINKS.get(link) if isinstance(link, str) else None
        if preset is None:
            raise OptionError(
                f"unknown link {shown(link)}; choose from {choices(link, LINKS)}; "
                "or build your own with flashsim.predict.Link(...)"
            )
        return preset


_LANES = 16 * 128 / 130 / 8  # bytes per transfer over 16 lanes of PCI Express

#: The presets by name.
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        name: Link(name, bandwidth, source=source)
        for name, bandwidth, source in (
            ("NVLink 2", 6 * 25e9, "[V]"),
            ("NVLink 3", 12 * 25e9, "[A]"),
            ("NVLink 3 bridge", 4 * 14.0625e9, "[G]"),
            ("NVLink 4", 18 * 25e9, "[H]"),
            ("NVLink 4 (H800)", 200e9, "[X]"),
            ("NVLink 5", 18 * 50e9, "[N]"),
            ("PCIe 3 x16", 8e9 * _LANES, "[P]"),
            ("PCIe 4 x16", 16e9 * _LANES, "[P]"),
            ("PCIe 5 x16", 32e9 * _LANES, "[P]"),
            ("InfiniBand EDR", 12.5e9, "[R]"),
            ("InfiniBand HDR", 25e9, "[Q]"),
            ("InfiniBand NDR", 50e9, "[Q]"),
            ("InfiniBand XDR", 100e9, "[Q]"),
        )
    }
)
