"""Time one call through each API, decoding, and `generate`: python benchmarks/doors.py

    python benchmarks/doors.py [--device cpu] [--parts host decode ...] [--csv FILE] [--profile DIR]

- `host`: the µs for which one call keeps the host busy, after warm-up, in a row of calls:
`flashsim.run` and its backward passes (`--backend`, `--kernel`); `flashsim.torch.attention` eager,
with a gradient, its backward pass, and under torch.compile; each beside torch's
`scaled_dot_product_attention` (SDPA). The shape is small, so the GPU is faster than the host. On a
CPU the time includes the computation.
- `alone`: the same for a single call on an idle GPU, which has to wake up.
- `result`: µs from a call to its result, for larger shapes: a forward pass, and one with its
backward pass, causal, bfloat16; also in a CUDA graph.
- `jax`: the same for `flashsim.jax.attention`, eager and under `jax.jit`.
- `decode`: µs of one query over a long cache, from call to result, beside SDPA.
- `generate`: ms per token of `model.generate` of a Llama with 12 random layers, beside "sdpa", for
the same prompt in each round. The first round is not counted.
- `generate-new`: the same for a prompt of another length in each round, so that no number of keys
occurs twice. cuDNN, which SDPA may run, prepares a plan for each number of keys.
- `train`: milliseconds of a training step of that Llama, beside "sdpa".

"nothing" is a lower bound: the same path through torch, JAX or transformers with an attention that
computes nothing (for JAX, q + 1). Implementations are interleaved; every figure is a median.
`--profile` writes a cProfile of the host's time for each API in `host` and `jax`.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import io
import os
import pstats
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

import flashsim.torch

Work = Callable[[], object]
ROW = 20  # calls; far fewer than a GPU's queue holds
COLUMNS = ("device", "part", "case", "implementation", "unit", "value", "over_sdpa")
SDPA, NOTHING = "sdpa", "nothing"
BACKENDS = {"cuda": "cupy", "cpu": "numba"}
#: Batch, heads, tokens, head_dim of the part `result`.
SHAPES = {
    "cuda": ((16, 16, 1024, 128), (2, 16, 8192, 128), (16, 16, 128, 64)),
    "cpu": ((1, 8, 512, 64),),
}


class Nothing(torch.autograd.Function):
    """An attention whose passes return tensors that exist already."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        """Return a tensor of q's shape."""
        ctx.made = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return tensors of the shapes of q, k and v."""
        return ctx.made


def nothing(q: Any, k: Any, v: Any) -> Any:
    """Return a new tensor of q's shape, by an operator in Python."""
    return torch.ops.flashsim_benchmark.nothing.default(q, k, v)


_LIBRARY = torch.library.Library("flashsim_benchmark", "FRAGMENT")
_LIBRARY.define("nothing(Tensor q, Tensor k, Tensor v) -> Tensor")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("nothing", lambda q, k, v: torch.empty_like(q), _key)
torch.library.register_fake("flashsim_benchmark::nothing", lambda q, k, v: torch.empty_like(q))


def waiter(device: str) -> Work:
    """Return a function that waits for the device."""
    return torch.cuda.synchronize if device == "cuda" else time.perf_counter


def in_a_row(works: dict[str, Work], wait: Work, rounds: int, row: int = ROW) -> dict[str, float]:
    """Return the median µs per call in a row of calls, by name; interleaved."""
    took: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 3):  # the first rounds compile and warm up
        for name, work in works.items():
            wait()
            start = time.perf_counter()
            for _ in range(row):
                work()
            took[name].append((time.perf_counter() - start) / row * 1e6)
            wait()
    return {name: median(times[3:]) for name, times in took.items()}


def to_result(works: dict[str, Work], wait: Work, rounds: int) -> dict[str, float]:
    """Return the median µs from a call to its result, by name; interleaved."""

    def waited(work: Work) -> Work:
        def both() -> None:
            work()
            wait()

        return both

    return in_a_row({name: waited(work) for name, work in works.items()}, wait, rounds, 1)


def profiled(name: str, work: Work, wait: Work, folder: Path) -> None:
    """Write a profile of the host's time of a call."""
    for _ in range(20):
        work()
    wait()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(200):
        work()
    profile.disable()
    wait()
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    stats.sort_stats("tottime").print_stats(45)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name.replace(' ', '-').replace(',', '')}.txt").write_text(text.getvalue())


def captured(work: Work) -> Work:
    """Return `work` as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def whole_calls(shape: tuple[int, ...], device: str) -> dict[str, Work]:
    """Return causal bfloat16 calls by name: forward passes, alone and with the backward pass."""
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    plain = [x.detach() for x in inputs]

    def sdpa(*x: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)

    def ours(*x: Any) -> Any:
        return flashsim.torch.attention(*x, causal=True, deterministic=False)

    def run() -> Any:
        return flashsim.run(*plain, causal=True, backend=BACKENDS[device])

    def forward(function: Callable[..., Any]) -> Work:
        def work() -> Any:
            with torch.no_grad():
                return function(*inputs)

        return work

    def with_backward(function: Callable[..., Any]) -> Work:
        return lambda: torch.autograd.grad(function(*inputs), inputs, dout)

    works: dict[str, Work] = {"forward, flashsim": run}
    works["with backward, flashsim"] = lambda: run().backward(dout, deterministic=False)
    for kind, make in (("forward", forward), ("with backward", with_backward)):
        works[f"{kind}, {SDPA}"] = make(sdpa)
        works[f"{kind}, flashsim.torch"] = make(ours)
        if device == "cuda":
            works[f"{kind}, flashsim.torch in a CUDA graph"] = captured(make(ours))
    return works


def run_doors(device: str, backend: str, kernel: str | None) -> dict[str, Work]:
    """Return `flashsim.run` and its backward passes on 4 heads of 128 tokens, by name."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, dout = torch.randn((4, 1, 4, 128, 64), device=device, dtype=dtype)
    options = {"backend": backend, **({"kernel": kernel} if kernel else {})}
    result = flashsim.run(q, k, v, **options)
    return {
        "run 4 x 128, flashsim": lambda: flashsim.run(q, k, v, **options),
        "backward 4 x 128, in order, flashsim": lambda: result.backward(dout, deterministic=True),
        "backward 4 x 128, fused, flashsim": lambda: result.backward(dout, deterministic=False),
    }


def torch_doors(device: str) -> dict[str, Work]:
    """Return calls by name: each PyTorch API of flashsim, and SDPA for the same."""
    shape = (1, 4, 128, 64) if device == "cuda" else None
    of_q, of_kv = (shape, shape) if shape else ((1, 8, 1, 64), (1, 8, 512, 64))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    backend = BACKENDS[device]
    q, k, v = (torch.randn(s, device=device, dtype=dtype) for s in (of_q, of_kv, of_kv))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    sdpa, ours = torch.nn.functional.scaled_dot_product_attention, flashsim.torch.attention
    dout = torch.randn_like(q)

    def backward(function: Callable[..., torch.Tensor], **options: Any) -> Work:
        out = function(*inputs, **options)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    works: dict[str, Work] = {
        f"eager, {SDPA}": lambda: sdpa(q, k, v),
        "eager, flashsim.torch": lambda: ours(q, k, v),
        "run, flashsim": lambda: flashsim.run(q, k, v, backend=backend),
        f"gradient, {SDPA}": lambda: sdpa(*inputs),
        "gradient, flashsim.torch": lambda: ours(*inputs),
        f"backward, {SDPA}": backward(sdpa),
        "backward, flashsim.torch": backward(ours),
        "backward, any order, flashsim.torch": backward(ours, deterministic=False),
        f"backward, {NOTHING}": backward(Nothing.apply),
    }
    for name, function in ((SDPA, sdpa), ("flashsim.torch", ours), (NOTHING, nothing)):
        compiled = torch.compile(function, fullgraph=True)
        works[f"compiled, {name}"] = lambda compiled=compiled: compiled(q, k, v)
        if device == "cuda":
            graphed = torch.compile(function, fullgraph=True, mode="reduce-overhead")
            works[f"compiled with CUDA graphs, {name}"] = lambda graphed=graphed: graphed(q, k, v)
    if device == "cuda":
        try:
            import cupy

            arrays = [cupy.from_dlpack(x.half()) for x in (q, k, v)]
            works["run, flashsim of CuPy"] = lambda: flashsim.run(*arrays, backend="cupy")
        except ImportError as error:
            print(f"no CuPy: {error}")
    return works


def jax_doors(device: str) -> dict[str, Work]:
    """Return calls of JAX's own attention and of `flashsim.jax.attention`, by name."""
    import jax
    import jax.numpy as jnp

    import flashsim.jax

    shapes = [(1, 4, 128, 64)] * 3 if device == "cuda" else [(1, 8, 1, 64), *[(1, 8, 512, 64)] * 2]
    dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
    keys = jax.random.split(jax.random.key(0), 3)
    given = [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]
    by_token = [jnp.swapaxes(x, 1, 2) for x in given]
    compiled, own = jax.jit(flashsim.jax.attention), jax.jit(jax.nn.dot_product_attention)
    same = jax.jit(lambda q, k, v: q + 1)
    return {
        f"eager, {SDPA}": lambda: jax.nn.dot_product_attention(*by_token),
        "eager, flashsim.jax": lambda: flashsim.jax.attention(*given),
        f"jit, {SDPA}": lambda: own(*by_token),
        "jit, flashsim.jax": lambda: compiled(*given),
        f"jit, {NOTHING}": lambda: same(*given),
    }


def decoding(device: str) -> dict[str, dict[str, Work]]:
    """Return, by shape, decoding of one query over a cache by flashsim and by SDPA."""
    sdpa, ours = torch.nn.functional.scaled_dot_product_attention, flashsim.torch.attention
    shapes = ((1, 32, 8, 32768, 128), (4, 32, 8, 4096, 128)) if device == "cuda" else (
        (1, 8, 8, 512, 64), (1, 32, 8, 4096, 128))  # fmt: skip
    dtype, cases = torch.bfloat16 if device == "cuda" else torch.float32, {}
    for batch, heads, kv_heads, n, d in shapes:
        q = torch.randn(batch, heads, 1, d, device=device, dtype=dtype)
        k, v = (torch.randn(batch, kv_heads, n, d, device=device, dtype=dtype) for _ in "kv")
        works: dict[str, Work] = {
            f"eager, {SDPA}": lambda q=q, k=k, v=v: sdpa(q, k, v, enable_gqa=True),
            "eager, flashsim.torch": lambda q=q, k=k, v=v: ours(q, k, v),
        }
        if hasattr(flashsim.torch, "decode"):
            works["decode, flashsim.torch"] = lambda q=q, k=k, v=v: flashsim.torch.decode(q, k, v)
        cases[f"{batch} x {n} keys, {heads} heads on {kv_heads}, d {d}"] = works
    return cases


def llama(device: str, layers: int = 12) -> Any:
    """Return a Llama with random weights."""
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        LlamaConfig,
        LlamaForCausalLM,
        masking_utils,
    )

    flashsim.torch.install()
    AttentionInterface.register(NOTHING, lambda _, q, *__, **___: (q.transpose(1, 2), None))
    AttentionMaskInterface.register(NOTHING, masking_utils.sdpa_mask)
    width = 2048 if device == "cuda" else 128
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers if device == "cuda" else 2,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256 or 1,
        max_position_embeddings=65536,
        vocab_size=1000,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return LlamaForCausalLM(config).to(device, dtype).eval()


#: Prompts of `generate`: batch, tokens, and number of new tokens.
PROMPTS = {"cuda": ((4, 4096, 64), (1, 32768, 64), (8, 1024, 64)), "cpu": ((1, 64, 16),)}


class Clock:
    """A logits processor that notes when each token's logits are ready."""

    def __init__(self) -> None:
        self.read: list[float] = []

    def __call__(self, words: Any, logits: Any) -> Any:
        """Return the logits unchanged."""
        self.read.append(time.perf_counter())
        return logits


def generating(device: str, prompts: Any, rounds: int, part: str) -> list[tuple[Any, ...]]:
    """Return rows with the median ms per new token of `generate`, per prompt and attention."""
    compiled, kind = part == "generate-compiled", KINDS[part]
    model, rows = llama(device), []
    for batch, n, new in prompts:
        words = torch.randint(1, 1000, (batch, n), device=device)  # 0 is padding
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
        options |= {"min_new_tokens": new + 1, "max_new_tokens": new + 1}
        if compiled:
            options["cache_implementation"] = "static"
        took: dict[str, list[float]] = {SDPA: [], "flashsim": []}
        if not compiled:
            took[NOTHING] = []
        turns = [name for _ in range(rounds + 1) for name in took]
        if compiled:  # one after the other, so that Dynamo's limit of recompilations is not reached
            turns.sort(key=[*took].index)
        for number, name in enumerate(turns):
            if compiled and number % (rounds + 1) == 0:
                torch._dynamo.reset()
            model.set_attn_implementation(name)
            prompt, clock = words, Clock()
            if part == "generate-new":  # the lengths n + 1 .. n + new of a round are only its own
                prompt = words[:, : n - number // len(took) * (new + 1)]
            model.generate(prompt, logits_processor=[clock], **options)
            took[name] += [1e3 * (end - start) for start, end in pairwise(clock.read)]
        case = f"{batch} x {n} tokens, {new} new, {kind}"
        rows += rows_of(part, case, {x: median(y[new:]) for x, y in took.items()}, "ms", SDPA)
    return rows


def training(device: str, rounds: int) -> list[tuple[Any, ...]]:
    """Return rows with the milliseconds of a training step, by attention."""
    model, wait = llama(device, 8).train(), waiter(device)
    words = torch.randint(1, 1000, (2, 2048 if device == "cuda" else 64), device=device)

    def step(name: str) -> Work:
        def run() -> None:
            model.set_attn_implementation(name)
            model.zero_grad()
            model(words, labels=words).loss.backward()

        return run

    times = to_result({name: step(name) for name in (SDPA, "flashsim")}, wait, rounds)
    case = f"{words.shape[0]} x {words.shape[1]} tokens"
    return rows_of("train", case, {x: y / 1e3 for x, y in times.items()}, "ms", SDPA)


def rows_of(
    part: str, case: str, values: dict[str, float], unit: str, beside: str
) -> list[tuple[Any, ...]]:
    """Rows of the table, each with its ratio to torch's own."""
    theirs = values.get(beside)
    return [
        (part, case, name, unit, round(x, 3), round(x / theirs, 3) if theirs else "")
        for name, x in values.items()
    ]


def by_case(part: str, values: dict[str, float]) -> list[tuple[Any, ...]]:
    """Return rows of works that are named "case, implementation"."""
    rows, cases = [], dict.fromkeys(name.rpartition(", ")[0] for name in values)
    for case in cases:
        own = {n.rpartition(", ")[2]: x for n, x in values.items() if n.rpartition(", ")[0] == case}
        theirs = {SDPA: values.get(f"{case.partition(',')[0]}, {SDPA}", 0.0)}
        rows += [row for row in rows_of(part, case, theirs | own, "us", SDPA) if row[2] in own]
    return rows


def measure(part: str, options: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Return the rows of one part."""
    device, rounds, wait = options.device, options.rounds, waiter(options.device)
    if part in ("host", "alone", "jax"):
        works = (jax_doors if part == "jax" else torch_doors)(device)
        if part != "jax":
            backend = options.backend or BACKENDS[device]
            works |= run_doors(device, backend, options.kernel)
        with torch.no_grad() if part == "jax" else torch.enable_grad():
            rows = by_case(part, in_a_row(works, wait, rounds, 1 if part == "alone" else ROW))
        if options.profile:
            for name, work in works.items():
                if SDPA not in name and NOTHING not in name:
                    profiled(f"{part} {name}", work, wait, options.profile)
        return rows
    if part == "result":
        rows = []
        for shape in SHAPES[device]:
            values = to_result(whole_calls(shape, device), wait, rounds)
            rows += [(p, f"{shape}: {c}", *rest) for p, c, *rest in by_case(part, values)]
        return rows
    if part == "decode":
        rows = []
        with torch.no_grad():
            for case, works in decoding(device).items():
                values = to_result(works, wait, rounds)
                rows += [(p, f"{case}: {c}", *rest) for p, c, *rest in by_case(part, values)]
        return rows
    if part == "train":
        return training(device, max(3, rounds // 10))
    prompts = PROMPTS[device][: options.prompts]
    return generating(device, prompts, options.repeat, part)


KINDS = {
    "generate": "dynamic cache",
    "generate-new": "dynamic cache, new lengths",
    "generate-compiled": "static cache, compiled",
}
PARTS = ("host", "alone", "result", "jax", "decode", "train", *KINDS)


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--parts", nargs="+", default=PARTS[:-1], choices=PARTS)
    parser.add_argument("--backend", help="of `flashsim.run` in `host`; default: cupy or numba")
    parser.add_argument("--kernel", help="option `kernel` of `flashsim.run` in `host`")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--repeat", type=int, default=5, help="rounds of the part generate")
    parser.add_argument("--prompts", type=int, help="number of prompts of the part generate")
    parser.add_argument("--csv", type=Path, help="file for the table")
    parser.add_argument("--profile", type=Path, help="folder for profiles of the host's time")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    found = []
    for part in options.parts:
        try:
            rows = measure(part, options)
        except ImportError as error:
            print(f"{part}: skipped, {error}")
            continue
        for row in rows:
            print(f"{row[0]:18} {row[1]:52} {row[2]:16} {row[4]:>10} {row[3]:3} {row[5]!s:>8}",
                  flush=True)  # fmt: skip
            found.append((name, *row))
        if options.csv:
            with options.csv.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(COLUMNS)
                writer.writerows(found)


if __name__ == "__main__":
    main()
