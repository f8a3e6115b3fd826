"""Compares predicted bytes and FLOPs with Nsight Compute's hardware counters, kernel by kernel."""

from flashsim.studies.verify.agreement import summary
from flashsim.studies.verify.cases import HERE, Case, Counted, MeasuredPass, here, predict
from flashsim.studies.verify.comparison import Row, Verification, verify
from flashsim.studies.verify.measure import Record, assign, counts_beside, passes_of, record
from flashsim.studies.verify.ncu import METRICS, MeasuredLaunch, command, parse
from flashsim.studies.verify.soak import compare, draw, table

__all__ = [
    "HERE", "METRICS", "Case", "Counted", "MeasuredLaunch", "MeasuredPass", "Record", "Row",
    "Verification", "assign", "command", "compare", "counts_beside", "draw", "here", "parse",
    "passes_of", "predict", "record", "summary", "table", "verify",
]  # fmt: skip
