"""Print the events of a trace, and the tiles that a thread block holds on chip."""

from pathlib import Path

import numpy as np

import flashsim
from flashsim import Tiling, Trace
from flashsim.schedule.names import OPS, TENSORS

q, k, v = np.random.default_rng(0).standard_normal((3, 96, 16), dtype=np.float32)
trace = flashsim.run(q, k, v, tiling=Tiling(32, 48), trace=True).trace

# Print one line per event: the operation, the tensor, the tile (i, j), and the bytes.
for event in trace.events[:12]:
    op, tensor = OPS[event["op"]], TENSORS[event["tensor"]]
    print(f"{op:<8}{tensor:<3} tile ({event['i']:>2}, {event['j']:>2})  {event['bytes']:>6,} B")

# trace.bytes("load") is the sum over all load events.
loads = trace.events[trace.events["op"] == OPS.index("load")]
assert loads["bytes"].sum() == trace.bytes("load")

names, held = trace.sram_timeline()
print(f"on chip {names}: at most {held.sum(axis=1).max():,} B = {trace.peak_sram():,} B")
print(f"bytes moved after each inner-loop iteration: {trace.cumulative().tolist()}")

# The simulated bytes equal those that the closed form predicts.
assert not trace.diff(trace.predicted())

path = Path("out") / "trace.npz"
path.parent.mkdir(exist_ok=True)
trace.save(path)
print(f"{len(Trace.load(path)):,} events read back from {path}")
