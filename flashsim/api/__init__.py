"""What users call."""

from flashsim.api.compare import Comparison, compare
from flashsim.api.counting import count
from flashsim.api.execution import Gradients, Result, backward, run
from flashsim.api.samples import load_sample, load_sample_trace, random_inputs
from flashsim.api.sweep import Sweep, sweep

__all__ = [
    "Comparison",
    "Gradients",
    "Result",
    "Sweep",
    "backward",
    "compare",
    "count",
    "load_sample",
    "load_sample_trace",
    "random_inputs",
    "run",
    "sweep",
]
