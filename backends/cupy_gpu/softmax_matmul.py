"""Compute softmax(X) V on a GPU in one kernel."""

from typing import Any

import cupy
import numpy as np

from flashsim.backends import failures
from flashsim.backends.cupy_gpu import arrays, engine
from flashsim.backends.cupy_gpu.launching import launch_once
from flashsim.backends.launch.kernel import row_elements
from flashsim.backends.launch_policy import softmax_matmul as family


def forward(
    x: Any, v: Any, block_1: int, block_2: int, *, counts: bool = False
) -> tuple[Any, dict[str, int]]:
    """Return softmax(X) V (batch, d1, d3) in the inputs' library, and the number of bytes moved."""
    engine.require_gpu()
    space = arrays.space_of({"x": x, "v": v}, "float32")
    engine.gpu_of(space.device)
    (batch, d1, d2), d3 = x.shape, v.shape[2]
    made, tiles = family.kernel(block_1, block_2, d3, counts=counts), -(-d1 // block_1)
    with failures.Explaining(), space.on_device():
        views = [space.view(a[:, None]) for a in (x, v)]
        width = row_elements(d3)
        out = space.empty((batch, 1, d1, width), views[0].array)
        with space.active():
            report = cupy.zeros((batch, tiles, 3), "uint32") if counts else None
        record = np.zeros((), family.ARGS)
        for name, view in zip("xv", views, strict=True):
            record[name], record[f"{name}_batch"], _, record[f"{name}_row"] = view.place
        record["o"], record["o_batch"], record["o_row"] = space.pointer(out), d1 * width, width
        record["counts"] = 0 if report is None else report.data.ptr
        record["d1"], record["d2"], record["d3"] = d1, d2, d3
        launch_once(made, (tiles, batch), record, space)
        result = space.result(out, d3, width)[:, 0]
        moved = {} if report is None else report.get().sum((0, 1), dtype=np.int64)
    names = ("load X", "load V", "store O")
    return result, dict(zip(names, map(int, moved), strict=False))
