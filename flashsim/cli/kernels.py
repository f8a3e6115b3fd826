"""The `flashsim kernel` command: run a user's Triton or Pallas file, and check its kernels."""

import ast
import functools
import inspect
import math
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flashsim.api import cost
from flashsim.cli import options as opt
from flashsim.cli.declare import Format, option
from flashsim.cli.kernel_arrays import KernelArrays, axes_of, forward_of
from flashsim.cli.output import ready, show
from flashsim.errors import FlashSimError, OptionError, TraceError, choices, shown
from flashsim.own_kernels.files import (
    beside,
    imported,
    imports,
    readers_errors,
    run_program,
)
from flashsim.problem import checks
from flashsim.problem.problem import Problem, numpy_dtype

_DEFAULT = Problem(256, head_dim=64, heads=2)
_FLAGS = ("causal", "is_causal")
#: Types of the arrays of numbers that --set accepts.
_KINDS = ("int32", "int64", "float32")
_SCALES = ("scale", "sm_scale", "softmax_scale")


def kernel(
    form: Format,
    target: Annotated[
        str,
        typer.Argument(
            help="FILE.py:function, a function that launches kernels; or FILE.py, a program."
        ),
    ],
    n_q: int = option(256, "Number of queries.", "-n"),
    n_kv: int | None = option(None, "Number of keys. Default: the number of queries."),
    head_dim: int = option(64, "Width of a row of Q and K.", "-d"),
    batch: int = option(1, "Batch size.", "-b"),
    heads: int = option(2, "Number of query heads.", "-h"),
    kv_heads: int | None = option(None, "Number of KV heads. Default: that of query heads."),
    dtype: str = option("float32", "Element type of the inputs."),
    causal: opt.Causal = False,
    ndim: int | None = option(
        None, "Number of axes of q: 2, 3 or 4. Default: as the file unpacks q.shape, or 4."
    ),
    layout: str | None = option(
        None, "Axes of q: bhnd, which is (batch, heads, n, d), or bnhd. Default: by their names."
    ),
    set_: list[str] | None = typer.Option(
        None,
        "--set",
        help="Set another parameter, NAME=VALUE; a VALUE such as 64x200 is a random array of that "
        "shape, and int32:0,100,256 an array of these numbers.",
    ),
    name: list[str] | None = typer.Option(
        None,
        "--name",
        help="PARAMETER=NAME: the attention tensor that a kernel's parameter holds, e.g. a_ptr=K.",
    ),
    reference: str | None = option(None, "Function in FILE.py that computes the expected results."),
    config: int | None = option(
        None, "Configuration of autotuned kernels to run, numbered from 0."
    ),
    model: str | None = option(
        None, "Pallas only: the hardware whose data movement is counted, gpu or tpu."
    ),
    device: opt.Device = "H100",
    seed: int = option(0, "Seed for drawing the random inputs."),
    out: Path | None = option(None, "Folder for an HTML page and a plot of the kernel."),
    all_: bool = typer.Option(False, "--all", help="Print the whole report."),
) -> None:
    """Check a Triton or Pallas kernel on the CPU, and count the bytes that each line moves.

    The user's function gets random arrays for parameters such as q, k and v. If no function is
    named, a Triton file runs as a program. The command needs Triton or JAX, but no GPU. FILE.py
    runs with your rights, like any program that you start. The exit code is 1 if a result is wrong.
    """
    path, function = _split(target)
    ready(None if out is None else out / "page.html")
    settings = dict(_pair("--set", pair) for pair in set_ or ())
    problem = Problem(n_q, n_kv, head_dim, None, batch, heads, kv_heads, dtype, causal)  # type: ignore[arg-type]
    text = path.read_text(encoding="utf-8", errors="replace")
    pallas = any("jax.experimental.pallas" in name for name in imports(text))
    options: dict[str, Any] = {
        **{"names": dict(_pair("--name", pair) for pair in name or ()), "device": device},
        **({"model": model} if pallas else {"config": config, "check": True}),
    }
    if pallas and not function:
        raise OptionError(
            f"{path} uses Pallas, so name the function that calls pl.pallas_call; pass "
            "FILE.py:function"
        )
    on_cpu: Any = nullcontext()
    if not pallas:
        if model is not None:
            raise OptionError(
                "--model is only for Pallas kernels; leave it out for a Triton kernel"
            )
        from flashsim.triton import watch
        from flashsim.triton.driver import standing_in
        from flashsim.triton.installed import installed

        installed()
        on_cpu = standing_in()
    described = ndim or layout or set_ or reference or problem != _DEFAULT
    if not function and described:
        raise OptionError(
            f"{path} runs as a program, because no function is named, but --causal, --set, "
            "--reference and the options for sizes, types and axes describe a function's "
            "arguments; pass FILE.py:function, or leave these options out"
        )
    compared = None
    with on_cpu, beside(path):
        if not function:
            with watch(**options) as seen, readers_errors(path):
                run_program(path)
        else:
            with readers_errors(path):
                module = imported(path)
            compared = None if reference is None else _attribute(module, reference)
            library = "torch" if not pallas and hasattr(module, "torch") else "numpy"
            arrays = KernelArrays(problem, library, ndim, layout, checks.seed(seed))
            call, used = _call(_attribute(module, function), function, arrays, settings)
            options["problem"] = arrays.problem if used else None
            if pallas:
                with readers_errors(path, _given(call)):
                    traced = _pallas(call, options)
            else:
                with watch(**options) as seen, readers_errors(path, _given(call)):
                    call()
    if not pallas:
        traced = seen.result(unchecked=True)
    note = ""
    try:
        hint = f"; {reference} gets a dict of the kernel's arrays by parameter"
        with nullcontext() if compared is None else readers_errors(path, hint):
            traced.check(compared)
    except TraceError as error:
        note = str(error)
    files = _written(traced, out) if out is not None else []
    if form.json or form.csv:
        show(traced.compared(), form)
    else:
        from flashsim.own_kernels.answer import LINES, answer

        typer.echo(answer(traced, files, note, 10_000 if all_ else LINES))
    if traced.verdict is not None and not traced.verdict.right:
        raise typer.Exit(1)


def _pallas(call: Any, options: dict[str, Any]) -> Any:
    """Trace a function call that runs Pallas kernels."""
    from flashsim.jax import trace_kernel

    def called(args: Any, keywords: Any) -> Any:
        return call.func(*args, **keywords)

    called.__qualname__ = getattr(call.func, "__qualname__", "the function")  # for errors
    return trace_kernel(called, call.args, call.keywords, **options)


def _split(target: str) -> tuple[Path, str]:
    file, _, function = target.rpartition(":") if ".py:" in target else (target, "", "")
    path = Path(file)
    if not path.is_file():
        raise OptionError(f"the file {file!r} does not exist; pass FILE.py:function")
    if path.suffix != ".py":
        raise OptionError(f"{file!r} is not a Python file; pass FILE.py:function")
    return path, function


def _attribute(module: Any, dotted: str) -> Any:
    value = module
    for part in dotted.split("."):
        if not hasattr(value, part):
            there = [n for n, x in vars(value).items() if callable(x) and not n.startswith("_")]
            raise OptionError(
                f"the file {module.__file__} has no {dotted!r}; choose from {choices(part, there)}"
            )
        value = getattr(value, part)
    return value


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise OptionError(f"the option {option} must have the form NAME=VALUE, got {text!r}")
    return name, value


def _value(text: str, dtype: str, rng: np.random.Generator) -> Any:
    """Convert a --set option's value to an array or a Python literal; keep other texts.

    "64x200" is a random array, and "int32:0,100,256" an array of the numbers.
    """
    if re.fullmatch(r"\d+(x\d+)+", text):
        shape = tuple(int(n) for n in text.split("x"))
        cost.fits(4 * math.prod(shape), "make a smaller array")
        return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))
    kind, _, numbers = text.partition(":")
    if kind in _KINDS and numbers:
        as_number = float if kind == "float32" else int
        try:
            return np.array([as_number(one) for one in numbers.split(",")], kind)
        except (ValueError, OverflowError):
            raise OptionError(
                f"--set got {text!r}, which is not an array of {kind}; write numbers between "
                f"commas, such as {kind}:0,100,256"
            ) from None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _call(
    called: Any, name: str, arrays: "KernelArrays", settings: dict[str, str]
) -> tuple[functools.partial[Any], bool]:
    """Return the user's function with its arguments bound, and whether it computes attention."""
    if hasattr(called, "run") and hasattr(called, "arg_names"):
        raise OptionError(
            f"{name} is itself a kernel; name a function that launches the kernel with a grid and "
            "strides (or use flashsim.triton.trace(kernel, grid, ...) in Python)"
        )
    if isinstance(called, type) and hasattr(called, "apply"):
        called = called.apply  # a torch.autograd.Function
    if not callable(called):
        raise OptionError(
            f"{name} is {shown(called)}, not a function; name a function that the file defines"
        )
    from flashsim.own_kernels.names import paper_name

    forward = forward_of(called)
    parameters: Mapping[str, inspect.Parameter]
    parameters = inspect.signature(called if forward is None else forward).parameters
    if forward is not None:
        import torch

        plain = called.__self__.setup_context is torch.autograd.Function.setup_context
        parameters = dict(list(parameters.items())[1 if plain else 0 :])  # without ctx
    loose = any(declared.kind is declared.VAR_POSITIONAL for declared in parameters.values())
    arrays.shape(axes_of(called))
    rng = np.random.default_rng(arrays.seed)
    given = {key: _value(text, arrays.problem.dtype, rng) for key, text in settings.items()}
    for key, value in given.items():
        if key in _SCALES and type(value) in (int, float):
            arrays.problem = replace(arrays.problem, scale=value)
        if key in _FLAGS and isinstance(value, bool):
            arrays.problem = replace(arrays.problem, causal=value)
    p = arrays.problem
    if loose:
        words = [arrays.of(paper) for paper in ("Q", "K", "V")]
        return functools.partial(called, *words, p.causal), True
    keywords: dict[str, Any] = {}
    attention = False
    for parameter, declared in parameters.items():
        paper = paper_name(parameter)
        if parameter in given:
            value = given[parameter]
            keywords[parameter] = arrays.own(value) if isinstance(value, np.ndarray) else value
        elif parameter in _FLAGS:
            keywords[parameter] = p.causal
        elif parameter in _SCALES and declared.default is declared.empty:
            keywords[parameter] = p.scale
        elif declared.default is not declared.empty:
            continue
        elif paper in _GIVEN:
            keywords[parameter] = arrays.of(paper)
            attention = True
        else:
            raise OptionError(
                f"{name} has a parameter {parameter!r}, which is not the name of an attention "
                f"tensor; set its value with --set {parameter}=VALUE, where a VALUE such as "
                "64x200 makes a random array, and int32:0,100,256 an array of these numbers"
            )
    for other in settings:
        if other not in parameters:
            raise OptionError(
                f"--set names the parameter {other!r}, but {name} has no such parameter; choose "
                f"from {choices(other, parameters)}"
            )
    if forward is not None:  # apply takes no keywords
        values = [keywords.get(one, declared.default) for one, declared in parameters.items()]
        return functools.partial(called, *values), attention
    return functools.partial(called, **keywords), attention


def _given(call: functools.partial[Any]) -> str:
    """Return a text for error messages: the arguments with which the user's function was called."""
    words = []
    for name, value in [*((f"argument {n}", x) for n, x in enumerate(call.args)),
                        *call.keywords.items()]:  # fmt: skip
        shape = getattr(value, "shape", None)
        words.append(f"{name}={value!r}" if shape is None else f"{name} {tuple(shape)}")
    called = f"; it was called with {', '.join(words)}" if words else ""
    return f"{called}. --ndim, --layout, -n, -d, --heads and --set change the arguments"


_GIVEN = ("Q", "K", "V", "O", "L", "dO", "delta")


def _written(traced: Any, out: Path) -> list[str]:
    """Write an HTML page and a plot of the kernel; return one line of text about each file."""
    from flashsim import viz

    stem = re.sub(r"\W+", "_", traced.name)[:40]
    files = []
    try:
        page = out / f"{stem}.html"
        viz.page(traced).save(page)
        files.append(f"{page}: the kernel's tiles, step by step")
    except FlashSimError as error:
        files.append(f"the page was not written: {error}")
    picture = out / f"{stem}.png"
    viz.save_figure(viz.traffic(traced).figure, picture)
    files.append(f"{picture}: bytes by tensor")
    return files
