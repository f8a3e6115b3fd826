"""X-ray of a program's attention kernels: hardware counters, and the tiles that they imply."""

from flashsim.studies.xray.infer import FORMS, Fit, Inference, LaunchCounters, candidates, infer
from flashsim.studies.xray.record import Launch, Profile, measure, measure_kernels
from flashsim.studies.xray.report import ProfiledKernel, XRay

__all__ = [
    "FORMS",
    "Fit",
    "Inference",
    "Launch",
    "LaunchCounters",
    "Profile",
    "ProfiledKernel",
    "XRay",
    "candidates",
    "infer",
    "measure",
    "measure_kernels",
]
