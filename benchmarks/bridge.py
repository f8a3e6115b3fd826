"""What flashsim costs inside torch: python benchmarks/bridge.py [--device cuda|cpu] [--check]

Medians, in microseconds, of a forward and of a forward with its backward pass, from call to result:
torch's `scaled_dot_product_attention`, `flashsim.run`, `flashsim.torch.attention`, and that in a
CUDA graph; then of a training step of a small Llama by Hugging Face's "sdpa" and by "flashsim".
`--check` first runs the tests of the bridges on that device, and ends with them if one fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import flashsim.torch
from flashsim.report import Table

Work = Callable[[], object]
SHAPES = {
    "cuda": ((16, 16, 1024, 128), (2, 16, 8192, 128), (16, 16, 128, 64)),
    "cpu": ((1, 8, 512, 64),),
}

TESTS = {
    "cuda": ("gpu/test_torch.py", "gpu/test_jax.py", "gpu/test_cupy_arrays.py"),
    "cpu": ("api/bridges/test_torch_attention.py", "api/bridges/test_torch_stand_in.py"),
}


def microseconds(works: dict[str, Work], device: str, rounds: int) -> dict[str, float]:
    """Medians by name, taken in turn, so that a slow moment of the machine meets them all."""
    wait: Work = torch.cuda.synchronize if device == "cuda" else time.perf_counter
    took: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 3):  # the first ones compile and warm up
        for name, work in works.items():
            wait()
            start = time.perf_counter()
            work()
            wait()
            took[name].append((time.perf_counter() - start) * 1e6)
    return {name: median(times[3:]) for name, times in took.items()}


def captured(work: Work) -> Work:
    """`work` as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def attentions(shape: tuple[int, ...], device: str) -> dict[str, tuple[Work, Work]]:
    """By name: a forward pass, and one with its backward pass; causal, bfloat16."""
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    backend = "cupy" if device == "cuda" else "numba"

    def run():
        return flashsim.run(*(x.detach() for x in inputs), causal=True, backend=backend)

    def with_gradient(function: Callable[..., torch.Tensor]) -> tuple[Work, Work]:
        def forward():
            with torch.no_grad():
                return function(*inputs)

        return forward, lambda: torch.autograd.grad(function(*inputs), inputs, dout)

    def sdpa(*x):
        return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)

    def ours(*x):
        return flashsim.torch.attention(*x, causal=True, deterministic=False)

    works = {
        "torch sdpa": with_gradient(sdpa),
        "flashsim.run": (run, lambda: run().backward(dout, deterministic=False)),
        "flashsim.torch": with_gradient(ours),
    }
    if device == "cuda":
        forward, both = works["flashsim.torch"]
        works["flashsim.torch, CUDA graph"] = captured(forward), captured(both)
    return works


def training(device: str) -> dict[str, Work]:
    """A step of a Llama, forward and backward, by attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    flashsim.torch.install()
    n, width = (2048, 1024) if device == "cuda" else (256, 128)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=1000,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    words = torch.randint(0, 1000, (2, n), device=device)

    def step(name):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(words, labels=words).loss.backward()

    return {"sdpa": lambda: step("sdpa"), "flashsim": lambda: step("flashsim")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=sorted(SHAPES))
    parser.add_argument("--check", action="store_true", help="run the bridges' tests first")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if options.check:
        tests = [str(Path(__file__).parents[1] / "tests" / name) for name in TESTS[options.device]]
        checked = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], check=False)
        if checked.returncode:
            sys.exit(checked.returncode)
    table = Table(
        f"causal, bfloat16, {options.device}, torch {torch.__version__}",
        ("(batch, heads, n, d)", "attention", "forward us", "with backward us"),
    )
    for shape in SHAPES[options.device]:
        works = attentions(shape, options.device)
        first, both = (
            microseconds(
                {name: pair[i] for name, pair in works.items()}, options.device, options.rounds
            )
            for i in (0, 1)
        )
        table.rows += [(str(shape), name, round(first[name]), round(both[name])) for name in works]
    try:
        steps = microseconds(training(options.device), options.device, options.rounds)
        table.rows += [("a Llama's step", name, None, round(x)) for name, x in steps.items()]
    except ImportError as error:
        print(f"no model: {error}")
    print(table.text(width=120))


if __name__ == "__main__":
    main()
