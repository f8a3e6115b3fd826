"""Time the FP8 forward beside the bfloat16 one, and the quantisation of its inputs.

    python benchmarks/fp8.py --csv fp8.csv [--lengths 4096,16384] [--repeats 15] [--error]

Prints a table and writes a CSV. Every shape has 16,384 tokens and 2048 columns of heads, inputs
from N(0, 1), in torch tensors on a Hopper GPU. At each shape all implementations are interleaved in
one process, each after a spinning kernel that hides the host's time; figures are medians. They are:
"bfloat16", flashsim's 16-bit forward; "fp8", FP8 inputs with V as the quantiser transposed it;
"fp8, v transposed", plain FP8 inputs, with V transposed by a flashsim kernel at every call;
"quantised", bfloat16 inputs quantised in blocks of 64 query and 128 key rows, with Q and K rotated,
then "fp8"; "cuDNN", torch's bfloat16 kernel; "cuDNN FP8", with one scale per tensor and out in
e4m3, if its frontend is installed (2 MB; the library comes with torch: ``pip install --no-deps
nvidia-cudnn-frontend==1.16.0``). TFLOP/s count 4 B H N^2 d, half for causal. Quantisers are
compared with a copy that moves as many bytes. `--error` adds the error on FlashAttention-3's
outliers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cudnn_fp8
from gpu_lab import TorchLab, csv_file, medians

import flashsim

COLUMNS = (
    *("what", "way", "n", "head_dim", "heads", "batch", "causal"),
    *("us", "tflops", "over bfloat16", "bytes", "of a copy", "rmse", "gpu"),
)
TOKENS, WIDTH, BLOCK = 16384, 2048, (64, 128)
DIMS = (64, 128, 256)
Work = Callable[[], Any]


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", default="fp8.csv", help="file for the table")
    parser.add_argument("--lengths", default="4096,16384", help="separated by commas")
    parser.add_argument("--dims", default=",".join(map(str, DIMS)), help="head_dims")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--error", action="store_true", help="also the error on outliers")
    options = parser.parse_args()
    try:
        lab = TorchLab()
        lab.array((1,), "float32")
    except Exception as error:
        sys.exit(f"benchmarks/fp8.py: torch sees no NVIDIA GPU: {error}")
    lengths, dims = (
        [int(x) for x in given.split(",")] for given in (options.lengths, options.dims)
    )
    with csv_file(options.csv, COLUMNS) as write:
        for row in rows(lab, lengths, dims, options.repeats, error=options.error):
            write(row | {"gpu": lab.name})
            print(line(row), flush=True)


def rows(
    lab: TorchLab, lengths: list[int], dims: list[int], repeats: int, *, error: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row per implementation and shape."""
    for d in dims:
        for n in lengths:
            for causal in (False, True):
                yield from forwards(lab, n, d, causal, repeats)
        yield from quantisers(lab, max(lengths), d, repeats)
    if error:
        yield from errors(lab)


def forwards(lab: TorchLab, n: int, d: int, causal: bool, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of one shape, with all implementations interleaved."""
    shape = TOKENS // n, WIDTH // d, n, d
    q, k, v = (lab.array(shape, "bfloat16") for _ in range(3))
    x = quantise(q, k, v)
    asked = {"backend": "cupy", "causal": causal}
    given = {"scales": x[3:6], "scale_block": BLOCK}

    def quantised() -> Any:
        y = quantise(q, k, v)
        more = {"scales": y[3:6], "scale_block": BLOCK, "v_transposed": y.v_transposed}
        return flashsim.run(*y[:3], **asked, **more)

    ways: dict[str, Work] = {
        "bfloat16": lambda: flashsim.run(q, k, v, **asked),
        "fp8": lambda: flashsim.run(*x[:3], **asked, **given, v_transposed=x.v_transposed),
        "fp8, v transposed": lambda: flashsim.run(*x[:3], **asked, **given),
        "quantised": quantised,
        "cuDNN": lambda: cudnn(lab, q, k, v, causal),
    }
    try:
        plain = quantise(q, k, v, "tensor", rotate=False)
        ways["cuDNN FP8"] = cudnn_fp8.forward(lab.torch, plain, causal=causal)
    except RuntimeError as error:
        print(f"without cuDNN's FP8: {error}", file=sys.stderr)
    times = medians(lab, ways, repeats)
    flops = 4 * shape[0] * shape[1] * n * n * d / (2 if causal else 1)
    about = {"what": "forward", "n": n, "head_dim": d, "causal": causal}
    about |= {"batch": shape[0], "heads": shape[1]}
    for way, us in times.items():
        yield about | {
            "way": way,
            "us": round(us, 1),
            "tflops": round(flops / us / 1e6, 1),
            "over bfloat16": round(times["bfloat16"] / us, 3),
        }


def quantise(q: Any, k: Any, v: Any, granularity: str = "block", *, rotate: bool = True) -> Any:
    """Quantise with the fused kernel; all signs are equal, which takes as long as any signs."""
    import numpy as np

    from flashsim.backends.cupy_gpu.quantize import quantize

    signs = np.ones(q.shape[-1], np.float32) if rotate else None
    return quantize(q, k, v, granularity, BLOCK, signs, "float8_e4m3fn")


def cudnn(lab: TorchLab, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Return the bfloat16 kernel of torch's scaled_dot_product_attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with lab.torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def quantisers(lab: TorchLab, n: int, d: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield rows of the fused quantiser alone, beside a copy of as many bytes."""
    shape = 2 * TOKENS // n, WIDTH // d, n, d
    q, k, v = (lab.array(shape, "bfloat16") for _ in range(3))
    elements = math.prod(shape)
    # 2 bytes in, 1 out; V is written twice, by rows and transposed. Two launches read twice.
    moved = {"block": 10 * elements, "head": 16 * elements}
    for granularity, nbytes in moved.items():
        source = lab.torch.empty(nbytes // 2, dtype=lab.torch.uint8, device="cuda")
        target = lab.torch.empty_like(source)
        ways: dict[str, Work] = {
            "rotated": lambda g=granularity: quantise(q, k, v, g),  # type: ignore[misc]
            "plain": lambda g=granularity: quantise(q, k, v, g, rotate=False),  # type: ignore[misc]
            "copy": lambda a=source, b=target: b.copy_(a),  # type: ignore[misc]
        }
        times = medians(lab, ways, repeats)
        for way, us in times.items():
            yield {
                "what": f"quantise, a scale each {granularity}",
                **{"way": way, "n": n, "head_dim": d, "batch": shape[0], "heads": shape[1]},
                **{"us": round(us, 1), "bytes": nbytes},
                "of a copy": round(times["copy"] / us, 3),
            }


def errors(lab: TorchLab) -> Iterator[dict[str, Any]]:
    """Yield rows of root mean square errors on FlashAttention-3's outliers."""
    torch, shape = lab.torch, (2, 4, 4096, 128)
    torch.manual_seed(0)
    wide = [
        torch.randn(shape, device="cuda", dtype=torch.float64)
        + 10
        * torch.randn(shape, device="cuda", dtype=torch.float64)
        * (torch.rand(shape, device="cuda") < 0.001)
        for _ in range(3)
    ]
    q, k, v = wide
    exact = torch.softmax(q @ k.mT / math.sqrt(shape[-1]), dim=-1) @ v
    narrow = [x.bfloat16() for x in wide]
    for granularity in ("tensor", "block"):
        for rotate in (False, True):
            x = quantise(*narrow, granularity, rotate=rotate)
            block: dict[str, Any] = {"scale_block": BLOCK} if granularity == "block" else {}
            out = flashsim.run(*x[:3], backend="cupy", scales=x[3:6], **block).out
            way = f"a scale each {granularity}" + (", rotated" if rotate else "")
            yield error_row(way, shape, out, exact)
    try:
        x = quantise(narrow[0], narrow[1], narrow[2], "tensor", rotate=False)
        out = cudnn_fp8.forward(torch, x, causal=False)()
        yield error_row("cuDNN FP8, a scale each tensor", shape, out, exact)
    except RuntimeError as error:
        print(f"without cuDNN's FP8: {error}", file=sys.stderr)
    yield error_row("bfloat16", shape, flashsim.run(*narrow, backend="cupy").out, exact)


def error_row(way: str, shape: tuple[int, ...], out: Any, exact: Any) -> dict[str, Any]:
    """Return the row of one way to compute `exact`."""
    rmse = (out.double() - exact).square().mean().sqrt().item()
    sizes = dict(zip(("batch", "heads", "n", "head_dim"), shape, strict=True))
    return {"what": "error on outliers", "way": way, **sizes, "rmse": f"{rmse:.2e}"}


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    shape = f"d {row['head_dim']:>3}, n {row['n']:>5}{', causal' if row.get('causal') else ''}"
    figures = [
        f"{row[name]} {unit}"
        for name, unit in (
            *(("us", "us"), ("tflops", "TFLOP/s"), ("over bfloat16", "x bfloat16")),
            *(("of a copy", "of a copy"), ("rmse", "rms error")),
        )
        if name in row
    ]
    return f"{row['what']}, {shape:<22} {row['way']:<18} " + "  ".join(figures)


if __name__ == "__main__":
    main()
