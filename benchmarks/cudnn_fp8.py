"""Run cuDNN's FP8 attention through its optional frontend (pip: nvidia-cudnn-frontend).

The frontend is a small wheel, since the library itself comes with torch. Version 1.16.0 is 2 MB;
later versions add kernels, which are not called here. It has no other dependencies: ``pip install
--no-deps nvidia-cudnn-frontend==1.16.0``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

#: The scale of P, which is at most 1; e4m3's largest number is 448.
SCALE_P = 256.0


def forward(torch: Any, x: Any, *, causal: bool) -> Callable[[], Any]:
    """Return a function that runs one forward pass on torch's stream and returns e4m3 out.

    cuDNN 9.19 writes no wider type from FP8 inputs on Hopper. It also writes the LSE and, as
    required outputs, the maxima of S and of O.

    Parameters
    ----------
    torch : module
    x : (q, k, v, q_scale, k_scale, v_scale), torch's tensors on a GPU
        e4m3, with one scale per tensor.
    causal : bool

    Raises
    ------
    RuntimeError
        If no frontend is installed, or cuDNN does not run this.
    """
    try:
        import cudnn
    except ImportError as error:
        raise RuntimeError(f"no cudnn frontend: {error}") from None
    try:
        return _built(torch, cudnn, x, causal)
    except Exception as error:  # pybind raises several types
        raise RuntimeError(f"cuDNN's FP8 attention: {type(error).__name__}: {error}") from error


def _built(torch: Any, cudnn: Any, x: Any, causal: bool) -> Callable[[], Any]:
    """Build one graph and run it once."""
    types = {
        torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3,
        torch.float32: cudnn.data_type.FLOAT,
    }
    handle = cudnn.create_handle()
    wide = {f"{part}_data_type": cudnn.data_type.FLOAT for part in ("intermediate", "compute")}
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FP8_E4M3, handle=handle, **wide)

    def one(value: float) -> Any:
        return torch.full((1, 1, 1, 1), value, dtype=torch.float32, device="cuda")

    given = dict(zip("qkv", x[:3], strict=True))
    for name, scale in zip("qkv", x[3:6], strict=True):
        given[f"descale_{name}"] = scale.reshape(1, 1, 1, 1)
    given |= {"descale_s": one(1 / SCALE_P), "scale_s": one(SCALE_P), "scale_o": one(1.0)}
    nodes = {
        name: graph.tensor(
            name=name, dim=list(a.shape), stride=list(a.stride()), data_type=types[a.dtype]
        )
        for name, a in given.items()
    }
    scale = 1 / math.sqrt(x[0].shape[-1])
    made = graph.sdpa_fp8(
        **nodes, generate_stats=True, attn_scale=scale, use_causal_mask=causal, name="fp8"
    )
    out = torch.empty(x[0].shape, dtype=torch.float8_e4m3fn, device="cuda")
    stats = torch.empty((*x[0].shape[:3], 1), dtype=torch.float32, device="cuda")
    buffers = {nodes[name]: a for name, a in given.items()}
    for node, a in zip(made, (out, stats, one(0), one(0)), strict=True):
        node.set_output(True).set_dim(list(a.shape)).set_stride(list(a.stride()))
        node.set_data_type(types[a.dtype])
        buffers[node] = a
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def run() -> Any:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(buffers, workspace, handle=handle)
        return out

    run()
    torch.cuda.synchronize()
    return run
