"""Check the tiles that `flashsim xray` infers: kernels with known tiles, on random shapes.

    python benchmarks/xray.py --seed 1 [--cases 6] [--save xray.json] [--csv xray.csv]

Draws shapes and tiles, and runs on each: flashsim's own kernels with the drawn tile (forward, fused
and three-pass backward), a Triton forward with drawn BLOCK sizes, and torch's FlashAttention-2,
whose kernels have their tiles in their names. One run under Nsight Compute reads the counters.
Prints for each kernel the true tile and the inferred one. The verdict is "right" if only one size
of the outer loop's side fits and the true tile fits, "in doubt" if several sizes of that side fit,
"no claim" if nothing fits, else "WRONG", which ends the program with an error. Needs a GPU, ncu,
torch and Triton.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flashsim import Problem, Tiling
from flashsim.counts.questions import in_words
from flashsim.counts.traffic import compulsory
from flashsim.errors import FlashSimError
from flashsim.studies.xray import Profile, ProfiledLaunch, XRay
from flashsim.studies.xray.record import launches_of, profile

_COMPUTES = re.compile(
    r"hopper_(forward|backward|dq|fused|dkdv)|flash_(forward|fused|dkdv|dq)|attention_forward"
    r"|flash_fwd|flash_bwd_dq"
)


@dataclass(frozen=True)
class Case:
    """A case to run, with the tile of each of its kernels if the caller chose it."""

    what: str  # "triton", "torch", or a kernel family of backend cupy
    sizes: dict[str, Any]
    forward: tuple[int, int] | None = None
    backward: tuple[int, int] | None = None
    deterministic: bool | None = None

    @property
    def problem(self) -> Problem:
        """Return the shape and the mask."""
        return Problem(**self.sizes)


def draw(rng: random.Random, what: str) -> Case:
    """Return a random shape, with a random tile if the caller chooses it."""
    d = rng.choice((64, 128) if what == "triton" else (64, 96, 128))
    n = rng.randint(300, 3000)
    sizes = {
        "n_q": n,
        "head_dim": d,
        "batch": rng.randint(1, 3),
        "heads": rng.choice((4, 6, 8)),
        "dtype": "bfloat16",
        "causal": rng.random() < 0.6,
    }
    if what == "torch":
        return Case(what, sizes)
    if what == "triton":
        return Case(what, sizes, (rng.choice((32, 64, 128)), rng.choice((32, 64, 128))))
    fused = rng.random() < 0.6
    algorithms = "flash2", "flash2-fused" if fused else "flash2"
    tiles = [
        _tile(rng, Problem(**sizes), what, direction, algorithm)
        for direction, algorithm in zip(("forward", "backward"), algorithms, strict=True)
    ]
    return Case(what, sizes, *tiles, deterministic=False if fused else None)


def same(what: str, sizes: dict[str, Any]) -> Case:
    """Return a case with this shape and the kernel's own tile; Triton's is 128 x 64."""
    return Case(what, sizes, (128, 64) if what == "triton" else None)


def _tile(
    rng: random.Random, p: Problem, family: str, direction: str, algorithm: str
) -> tuple[int, int]:
    """Return one of the tiles that a family's kernels have for this problem."""
    from flashsim.backends.cupy_gpu.engine import gpu_of
    from flashsim.backends.launch_policy.hopper import HOPPER
    from flashsim.backends.launch_policy.portable import PORTABLE

    kernels = {"hopper": HOPPER, "portable": PORTABLE}[family]
    tile = rng.choice(kernels.tilings(p, gpu_of(0), direction, algorithm))
    return tile.block_q, tile.block_k


# -- in the process that is profiled --------------------------------------------------------------


def launch(path: str) -> None:
    """Run the cases of a file, with each pass in an NVTX range with its number."""
    import torch

    for n, values in enumerate(json.loads(Path(path).read_text())):
        case = Case(**values)
        p = case.problem
        shapes = [(p.batch, h, m, p.head_dim) for h, m in ((p.heads, p.n_q), (p.kv_heads, p.n_kv))]
        make = lambda shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        q, k, v, dout = make(shapes[0]), make(shapes[1]), make(shapes[1]), make(shapes[0])
        for direction, run in steps(case, q, k, v, dout):
            run()  # compiles
            torch.cuda.synchronize()
            with torch.cuda.nvtx.range(f"flashsim.watch {n}{direction}"):
                run()
                torch.cuda.synchronize()


def steps(case: Case, q: Any, k: Any, v: Any, dout: Any) -> Iterator[tuple[str, Any]]:
    """Yield the call of each pass."""
    import torch

    import flashsim

    causal = case.problem.causal
    if case.what in ("torch", "cudnn", "flex", "cute"):
        inputs = [x.requires_grad_() for x in (q, k, v)]
        attend, kept = framework(case.what, causal), {}

        def forward() -> None:
            kept["out"] = attend(*inputs)

        yield "", forward
        out = kept["out"]
        yield " backward", lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    elif case.what == "triton":
        from xray_triton import attend

        yield "", lambda: attend(q, k, v, causal, *case.forward)  # type: ignore[misc]
    else:
        made: dict[str, Any] = {}
        tiles = [Tiling(*tile) if tile else None for tile in (case.forward, case.backward)]

        def run() -> None:
            made["r"] = flashsim.run(
                q, k, v, causal=causal, backend="cupy", kernel=case.what, tiling=tiles[0]
            )

        yield "", run
        yield (
            " backward",
            lambda: made["r"].backward(dout, deterministic=case.deterministic, tiling=tiles[1]),
        )


def framework(what: str, causal: bool) -> Any:
    """Return a library's attention on (batch, heads, n, d) tensors."""
    import torch

    if what == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention)

        def flex(q: Any, k: Any, v: Any) -> Any:
            n = q.shape[2]
            mask = (
                create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n) if causal else None
            )
            return compiled(q, k, v, block_mask=mask)

        return flex
    if what == "cute":
        from flash_attn.cute.interface import flash_attn_func

        def cute(*tensors: Any) -> Any:
            out = flash_attn_func(*(x.transpose(1, 2) for x in tensors), causal=causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return cute
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.FLASH_ATTENTION if what == "torch" else SDPBackend.CUDNN_ATTENTION

    def sdpa(*tensors: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)

    return sdpa


# -- in the process that reads the counters -------------------------------------------------------


def truth(case: Case, kernel: str, direction: str) -> tuple[int, int] | None:
    """Return a kernel's true tile: from its template arguments, or from the case."""
    traits = re.search(r"Flash_(?:fwd|bwd)_kernel_traits<\d+, (\d+), (\d+)", kernel)
    if traits:
        return int(traits[1]), int(traits[2])
    return case.forward if direction == "forward" else case.backward


def judged(found: Any, tile: tuple[int, int], p: Problem) -> str:
    """Return the verdict: "right", "in doubt", "no claim" or "WRONG".

    Right: the true tile is among those that fit, and only one size of the outer loop's side fits.
    The other side is often ambiguous; then all sizes that fit are listed.
    """
    if not found.fits:
        return "no claim"
    for side, name, extent in zip(tile, ("block_q", "block_k"), (p.n_q, p.n_kv), strict=True):
        sides = found.sides(name)
        if side not in sides and not (side >= extent and max(sides) >= extent):
            return "WRONG"
    outer = "block_k" if found.form in ("fused", "dkdv") else "block_q"
    return "right" if len(found.sides(outer)) == 1 else "in doubt"


def main() -> None:
    """Draw, measure, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=6, help="cases per kind")
    parser.add_argument("--kinds", default="hopper,portable,triton,torch")
    parser.add_argument(
        "--shape",
        help="BATCH,HEADS,N,D: run all kinds on this shape, with and "
        "without a causal mask, without random tiles; kinds may also be cudnn, flex and cute",
    )
    parser.add_argument("--save", type=Path, help="a record for `flashsim xray --from`")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--launch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch(options.launch)
        return
    rng, kinds = random.Random(options.seed), options.kinds.split(",")
    if options.shape:
        batch, heads, n, d = map(int, options.shape.split(","))
        sizes = {"n_q": n, "head_dim": d, "batch": batch, "heads": heads, "dtype": "bfloat16"}
        cases = [
            same(kind, sizes | {"causal": causal}) for causal in (False, True) for kind in kinds
        ]
    else:
        cases = [draw(rng, kind) for kind in kinds for _ in range(options.cases)]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps([asdict(case) for case in cases]))
        try:
            text = profile(
                [sys.executable, __file__, "--launch", str(file)], ranges=True, launches=2000
            )
        except FlashSimError as error:
            sys.exit(f"{sys.argv[0]}: {error}")
    found = []
    for launch_, label in launches_of(text):
        number = int(re.search(r"\d+", label)[0])  # type: ignore[index]
        direction = "backward" if label.endswith("backward") else "forward"
        found.append(ProfiledLaunch.of(launch_, number, direction))
    from flashsim.studies.verify import here

    calls = tuple(
        {"name": "", "api": case.what, "note": f"case {n}", "problem": case.sizes}
        for n, case in enumerate(cases)
    )
    record = Profile("benchmarks/xray.py", here(), calls, tuple(found))
    if options.save:
        record.save(options.save)
    rows = []
    for one in XRay(record).kernels:
        case = cases[one.launch.call]
        tile = truth(case, one.launch.kernel, one.launch.direction)
        if one.problem is None or not one.launch.seen.tensor_flops:
            continue
        if tile is None and not options.shape:
            continue
        if tile is not None and not _COMPUTES.search(one.launch.kernel):
            continue
        row = {
            "kind": case.what,
            "kernel": one.name,
            "pass": one.launch.direction,
            "shape": in_words(one.problem),
            "true": "" if tile is None else "{} x {}".format(*tile),
            "form": one.found.form,
            "query tile": one.side("block_q"),
            "key tile": one.side("block_k"),
            "read B": int(one.launch.seen.read),
            "read / compulsory": one.launch.seen.read
            / compulsory(one.problem, one.launch.direction),
            "DRAM B": int(sum(x for n, x in one.launch.counters.items() if "DRAM" in n)),
            "us": one.launch.counters["seconds"] * 1e6,
            "verdict": "" if tile is None else judged(one.found, tile, one.problem),
        }
        rows.append(row)
        print("  ".join(str(value) for value in row.values()), flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file_:
            writer = csv.DictWriter(file_, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    verdicts = [row["verdict"] for row in rows]
    counts = {name: verdicts.count(name) for name in ("right", "in doubt", "no claim", "WRONG")}
    print(", ".join(f"{name}: {n}" for name, n in counts.items()))
    if counts["WRONG"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
