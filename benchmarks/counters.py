"""Counted bytes beside the GPU's own counters: run it under Nsight Compute.

    ncu --clock-control none -k 'regex:flash_|hopper_' --launch-count 4 --metrics \
        l1tex__m_xbar2l1tex_read_bytes.sum,lts__t_sectors_srcunit_tex_op_read.sum,\
lts__t_sectors_srcunit_tex_op_write.sum,lts__t_sectors_srcunit_tex_op_red.sum,dram__bytes_read.sum \
        python benchmarks/counters.py [--causal] [--kernel hopper]

The first four launches are untraced: forward, delta, fused dK dV dQ, convert. Then the same again
with counts, which are printed. Loads compare with what reaches the SMs (xbar2l1tex, bytes); at the
L2 slices (lts, sectors of 32 B) requests of several SMs for one sector may have been joined.
"""

from __future__ import annotations

import argparse

import torch

import flashsim


def main() -> None:
    """Forward and fused backward, untraced and then traced."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernel", default="portable", choices=("auto", "portable", "hopper"))
    options = parser.parse_args()
    chosen = {"causal": options.causal, "backend": "cupy", "kernel": options.kernel}
    shape = (1, 16, 4096, options.head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for trace in (False, True):
        result = flashsim.run(q, k, v, trace=trace, **chosen)
        gradients = result.backward(dout, deterministic=False)
    torch.cuda.synchronize()
    for trace in (result.trace, gradients.trace):
        for stage in trace.stages:
            for op in ("load", "store", "reduce"):
                total = sum(
                    n
                    for (name, kind, _), n in trace.transfers.items()
                    if (name, kind) == (stage.name, op)
                )
                print(f"{stage.name:<8} {op:<7} {total:>15,} B = {total // 32:>13,} sectors")


if __name__ == "__main__":
    main()
