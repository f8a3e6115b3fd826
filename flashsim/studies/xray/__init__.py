"""Infers the tile sizes of a program's attention kernels from the GPU's hardware counters."""

from flashsim.studies.xray.candidates import FORMS, Fit, candidates
from flashsim.studies.xray.infer import Inference, LaunchCounters, infer
from flashsim.studies.xray.record import Profile, ProfiledLaunch, measure, measure_kernels
from flashsim.studies.xray.report import ProfiledKernel, XRay

__all__ = [
    "FORMS", "Fit", "Inference", "LaunchCounters", "Profile", "ProfiledKernel", "ProfiledLaunch",
    "XRay", "candidates", "infer", "measure", "measure_kernels",
]  # fmt: skip
