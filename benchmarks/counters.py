"""Compare kernel-reported bytes with the GPU's hardware counters, under Nsight Compute.

    ncu --clock-control none -k 'regex:flash_|hopper_' --launch-count 4 --metrics \
        l1tex__m_xbar2l1tex_read_bytes.sum,lts__t_sectors_srcunit_tex_op_read.sum,\
lts__t_sectors_srcunit_tex_op_write.sum,lts__t_sectors_srcunit_tex_op_red.sum,dram__bytes_read.sum \
        python benchmarks/counters.py [--causal] [--kernel hopper]

The first four launches are untraced: forward, delta, fused dK dV dQ, convert. Then the same
launches run traced, and their kernel-reported bytes are printed. Compare loads with the bytes that
reach the SMs (xbar2l1tex). At the L2 slices (lts, sectors of 32 B), requests of several SMs for one
sector may have been merged.

    ncu --clock-control none -k flash_decode --launch-count 1 --metrics \
        l1tex__m_xbar2l1tex_read_bytes.sum,lts__t_sectors_srcunit_tex_op_write.sum,\
dram__bytes_read.sum,dram__bytes_write.sum \
        python benchmarks/counters.py --decode [--keys 32768] [--splits 16] [--page 16]

The second command measures one decoding launch: the bytes of its split and its combine, its
block-table reads, and DRAM bytes. Both stages are one kernel. So the combine's bytes are the
difference from a launch with --splits 1, and block-table reads are the difference from a launch
without --page.
"""

from __future__ import annotations

import argparse

import torch

import flashsim


def decode(options: argparse.Namespace) -> None:
    """Run one decode call, untraced and then traced, and print its bytes beside the predictions."""
    from flashsim import Problem, Tiling
    from flashsim.backends.cupy_gpu import arrays, engine
    from flashsim.backends.cupy_gpu import decode as launcher
    from flashsim.backends.launch_policy import decode_plan as family
    from flashsim.engines.protocol import Job

    batch, keys, d, page = options.batch, options.keys, options.head_dim, options.page
    whole = {"batch": batch, "heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
    p = Problem(1, keys, d, **whole)
    made = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, given = made(batch, 32, 1, d), {}
    if page:
        pages = batch * -(-keys // page)
        k, v = (made(pages, 8, page, d) for _ in range(2))
        table = torch.randperm(pages, device="cuda").int().view(batch, -1)
        given = {"block_table": table, "cache_seqlens": [keys] * batch}
    else:
        k, v = (made(batch, 8, keys, d) for _ in range(2))
    if options.splits:
        given["splits"] = options.splits
    flashsim.run(q, k, v, algorithm=family.ALGORITHM, backend="cupy", **given)
    torch.cuda.synchronize()
    space = arrays.space_of({"q": q}, p.dtype)
    gpu = engine.gpu_of(space.device)
    counted = launcher.counted(
        Job(p, q, k, v, algorithm=family.ALGORITHM, options=given), gpu, space
    )
    plan = family.plan(p, (keys,) * batch, gpu, options.splits, page)
    expected = flashsim.count(
        Problem(1, keys, d, page_size=page or None, **whole),
        algorithm=family.ALGORITHM, device="H200", splits=plan.splits[0],
        tiling=Tiling(16, plan.block_k),
    )  # fmt: skip
    stores = ("O_part", "L_part", "O", "L")
    print(f"{plan.splits[0]} splits, tiles of {plan.block_k} keys, {plan.grid[0]} blocks")
    for name, nbytes in counted.items():
        print(f"{'store' if name in stores else 'load':<6} {name:<12} {nbytes:>15,} B")
    for op, names in (("load", set(counted) - {*stores}), ("store", stores)):
        total = sum(counted[name] for name in names)
        same = (
            "as counted" if total == expected.bytes(op) else f"closed form {expected.bytes(op):,}"
        )
        print(f"{op:<6} {'all':<12} {total:>15,} B = {total // 32:>13,} sectors, {same}")
    dram = flashsim.l2.dram(expected)
    print(f"DRAM   {'read':<12} {dram.bytes('read'):>15,} B by the model of the L2 cache")


def main() -> None:
    """Run the forward and the fused backward, untraced and then traced."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--decode", action="store_true", help="decode 32 query heads on 8 KV heads")
    parser.add_argument("--batch", type=int, default=1, help="batch size of --decode")
    parser.add_argument("--keys", type=int, default=32768, help="keys of --decode")
    parser.add_argument(
        "--splits", type=int, default=None, help="splits of --decode; default: automatic"
    )
    parser.add_argument(
        "--page", type=int, default=0, help="keys per page of --decode; 0: contiguous"
    )
    parser.add_argument("--kernel", default="portable", choices=("auto", "portable", "hopper"))
    options = parser.parse_args()
    if options.decode:
        decode(options)
        return
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
