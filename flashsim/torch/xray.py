"""The process that `flashsim xray` profiles: attention calls of a program run in NVTX ranges.

    python -m flashsim.torch.xray CALLS.json PROGRAM [arguments]

CALLS.json lists the call and the pass of each range.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from flashsim.errors import FlashSimError
from flashsim.problem.problem import Problem
from flashsim.torch import program
from flashsim.torch.calls import AttentionCall
from flashsim.torch.watch import in_ranges


def described(call: AttentionCall) -> dict[str, Any]:
    """Return a call as a dict for JSON; "problem" is None if the call cannot be counted."""
    about: dict[str, Any] = {"name": call.name, "api": call.api, "note": call.note}
    try:
        values = {field.name: getattr(call.problem, field.name) for field in fields(Problem)}
    except FlashSimError:
        return about | {"problem": None}
    for name in ("mask", "block_mask"):
        if values[name] is not None:
            about["note"] = f"{about['note']}; its {name} is not kept".lstrip("; ")
            return about | {"problem": None}
    return about | {"problem": {name: x for name, x in values.items() if x is not None}}


def main(out: str, script: str, *arguments: str) -> int:
    """Run the program, write descriptions of all attention calls, and return the exit code."""
    if not torch.cuda.is_available():
        print("flashsim xray: torch sees no GPU", file=sys.stderr)
        return 1
    with in_ranges(torch.cuda.nvtx.range) as ranges:
        code = program.run(Path(script), arguments)
        torch.cuda.synchronize()
    calls: dict[int, dict[str, Any]] = {}
    found = {}
    for name, (call, direction) in ranges.calls.items():
        calls.setdefault(id(call), described(call))
        found[name] = [list(calls).index(id(call)), direction]
    gpu = torch.cuda.get_device_properties(0)
    figures = gpu.name, (gpu.major, gpu.minor), gpu.multi_processor_count, gpu.total_memory
    told = {"calls": list(calls.values()), "ranges": found, "gpu": figures}
    Path(out).write_text(json.dumps(told))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
