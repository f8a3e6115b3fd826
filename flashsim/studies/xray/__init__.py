"""X-ray of a program's attention kernels: hardware counters, and the tiles that they imply."""

from flashsim.studies.xray.infer import FORMS, Counters, Fit, Inference, candidates, infer
from flashsim.studies.xray.record import Launch, Record, measure, measure_kernels
from flashsim.studies.xray.report import Kernel, XRay

__all__ = [
    "FORMS",
    "Counters",
    "Fit",
    "Inference",
    "Kernel",
    "Launch",
    "Record",
    "XRay",
    "candidates",
    "infer",
    "measure",
    "measure_kernels",
]
