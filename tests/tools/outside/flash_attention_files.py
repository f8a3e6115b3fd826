"""Fetch flash-attention's own test files, and run them on flashsim's interfaces.

FlashAttention-2's test_flash_attn.py runs on `flashsim.torch.flash_attn`, on a CPU with its device
replaced. On CUDA, FlashAttention-3's runs on `flashsim.torch.flash_attn_interface`, and the five
files of the CuTe kernels run on `flashsim.torch.flash_attn_cute`. The files are kept in
build/outside/, or FLASH_ATTENTION names the folder of a clone. They need einops.
"""

import contextlib
import importlib.util
import inspect
import io
import itertools
import os
import sys
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flashsim.errors import UnsupportedError
from flashsim.torch import flash_attn, flash_attn_cute, flash_attn_interface
from outside.cases import NotApplicable, Point, Test, one_of_each

TITLE = "flash-attention's own files"
COMMIT = "0251105a2fb19d2957484b7f023cd8c115286ced"
URL = "https://raw.githubusercontent.com/Dao-AILab/flash-attention"
FA2, FA3 = (f"{room}/test_flash_attn.py" for room in ("tests", "hopper"))
#: The group of each file of the CuTe kernels.
CUTE = {
    f"tests/cute/{name}.py": group
    for name, group in (
        ("test_flash_attn", "CuTe"),
        ("test_flash_attn_fast", "CuTe fast"),
        ("test_flash_attn_race_condition", "CuTe race"),
        ("test_flash_attn_varlen", "CuTe varlen"),
        ("test_flash_attn_combine", "CuTe combine"),
    )
}
TESTING = "flash_attn/cute/testing.py"
PADDING = "flash_attn/bert_padding.py"
FILES = (*(FA2, FA3, PADDING, "hopper/padding.py", "hopper/test_util.py"), *(*CUTE, TESTING))
#: Tests of the packages' internals: arguments of private functions, generators, wheels.
INSIDE = {
    "test_flash_attn_varlen_paged_kv_num_splits": "it calls a private function of flash_attn",
    "test_flash_attn_generator_arg_must_be_none": "it calls flash_attn's extension itself",
    "test_flash_attn_kvcache_paged_block_table_bounds": "it calls flash_attn's extension itself",
    "test_flash3_bw_compatibility": "it compares schemas of flash_attn_3's extension",
    "test_flash_attn_bwd_preallocated_outputs": "it calls private functions of flash_attn.cute",
    "test_flash_attn_varlen_tensor_max_seqlen_reuses_fwd_cache": "it reads flash_attn.cute's cache",
    "test_flash_attn_invalid_head_dim": "it expects errors for head dims that flashsim supports",
}
#: Maximum number of scores of one head on a CPU; larger sizes are left out.
MOST = 2**17
#: What a test file asks of CUDA, and what a CPU answers.
ON_CPU = {
    '"cuda"': '"cpu"',
    'torch.cuda.get_device_capability("cpu")': "(9, 0)",
    'torch.cuda.get_device_properties("cpu").total_memory': "2**40",
    **dict.fromkeys(("range(50)", "range(250)"), "range(2)"),  # runs that give the same bits
}
#: Names of values that distinguish kinds of a test's points: one point of each kind is run.
TELLING = ("seqlen_q", "seqlen_k", "seqlen"), ("d", "D", "head_dim", "sink_dtype")


def folder(names: Sequence[str]) -> Path:
    """Return the folder of the files, after fetching those named if necessary."""
    if given := os.environ.get("FLASH_ATTENTION"):
        return Path(given)
    root = Path(__file__).resolve().parents[3] / "build" / "outside" / COMMIT[:12]
    for name in names:
        path = root / name
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(f"{URL}/{COMMIT}/{name}", timeout=60) as answer:
            path.write_bytes(answer.read())
    return root


def tests(device: str, whole: bool) -> list[Test]:
    """Return the tests of all files, on a CPU those of FlashAttention-2's."""
    gpu = device == "cuda"
    root = folder(FILES if gpu else (FA2, PADDING))
    rooms = [("FA2", FA2, _flash_attn(root))]
    if gpu:
        rooms.append(("FA3", FA3, _flash_attn_interface(root)))
        rooms += [(group, file, _cute(root)) for file, group in CUTE.items()]
    return [
        _test(f"{group} {name.removeprefix('test_')}", function, whole, gpu)
        for group, file, modules in rooms
        for name, function in vars(_loaded(root, file, modules, {} if gpu else ON_CPU)).items()
        if name.startswith("test_") and callable(function)
    ]


def _test(name: str, function: Any, whole: bool, gpu: bool) -> Test:
    marks = [m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"]
    axes = []
    for mark in marks:
        names = [part.strip() for part in mark.args[0].split(",")]
        values = [x if len(names) > 1 else (x,) for x in mark.args[1]]
        axes.append([dict(zip(names, value, strict=True)) for value in values])
    points = [dict(itertools.chain.from_iterable(p.items() for p in point)) for point in
              itertools.product(*axes)]  # fmt: skip
    present = points[0] if points else {}
    told = [tuple(n for n in names if n in present) for names in TELLING]

    def choose(fit: Sequence[Point]) -> Sequence[Point]:
        if whole:
            return fit
        fit = fit if gpu else [point for point in fit if _scores(point) <= MOST]
        some = [point for names in told if names for point in one_of_each(*names)(fit)]
        return some or fit[:1]

    unfit = partial(_unfit, function.__name__, _outside_points(function, present))
    return Test(name, partial(_run, function), points, unfit, choose)


def _scores(point: Point) -> int:
    square = point.get("seqlen", 1)
    return point.get("seqlen_q", square) * point.get("seqlen_k", square)


def _outside_points(function: Any, present: Point) -> str:
    """Return why no point of a test applies; "" if points do."""
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "skipif" and mark.args[0]:
            return f"the test skips this GPU: {mark.kwargs['reason']}"
    if fixtures := {*inspect.signature(function).parameters} - {*present}:
        return f"it replaces parts of the package itself ({', '.join(sorted(fixtures))})"
    return ""


def _run(function: Any, **point: Any) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the tests print errors
            function(**point)
    except pytest.skip.Exception as skipped:
        raise NotApplicable(f"the test skips it{f': {skipped}' if str(skipped) else ''}") from None
    except pytest.xfail.Exception as expected:
        raise NotApplicable(f"the test expects a failure: {expected}") from None
    except pytest.fail.Exception as failed:  # pytest's class cannot be pickled
        raise AssertionError(str(failed)) from None
    except UnsupportedError as error:
        if "up to 256" in str(error):
            raise NotApplicable("flashsim's GPU kernels take a head_dim of up to 256") from None
        raise
    except torch.cuda.OutOfMemoryError:
        raise NotApplicable("the GPU's memory is too small for the test's reference") from None
    finally:
        torch.cuda.empty_cache()


def _unfit(name: str, always: str, point: Point) -> str:
    if name in INSIDE or always:
        return INSIDE.get(name, always)
    if point.get("local_enum") and point.get("causal"):
        return "the test skips a causal mask with a window"
    return "flashsim has no dropout" if point.get("dropout_p") else ""


def _loaded(
    root: Path, file: str, modules: dict[str, ModuleType], edits: dict[str, str]
) -> ModuleType:
    """Run a test file, after the edits, as a module whose imports find `modules`."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        module = ModuleType(file.replace("/", "_").removesuffix(".py"))
        module.__file__ = str(root / file)
        text = (root / file).read_text(encoding="utf-8")
        for old, new in edits.items():
            text = text.replace(old, new)
        exec(compile(text, module.__file__, "exec"), module.__dict__)
        return module
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def _flash_attn(root: Path) -> dict[str, ModuleType]:
    """Return modules that replace the package flash_attn."""
    package = ModuleType("flash_attn")
    for name in flash_attn.__all__:
        setattr(package, name, getattr(flash_attn, name))
    inside = ModuleType("flash_attn.flash_attn_interface")
    vars(inside).update(_get_block_size_n=lambda *_: 128, USE_TRITON_ROCM=False)
    padding = _file(root / PADDING, "flash_attn.bert_padding")
    return {
        "flash_attn": package,
        "flash_attn.flash_attn_interface": inside,
        "flash_attn.bert_padding": padding,
        **_rotary(),
    }


def _flash_attn_interface(root: Path) -> dict[str, ModuleType]:
    """Return modules that replace FlashAttention-3's flash_attn_interface."""
    module = ModuleType("flash_attn_interface")
    for name in flash_attn_interface.__all__:
        setattr(module, name, getattr(flash_attn_interface, name))
    padding = _file(root / "hopper/padding.py", "padding")
    sys.modules["padding"] = padding
    util = _file(root / "hopper/test_util.py", "test_util")
    return {
        "flash_attn_interface": module,
        "padding": padding,
        "test_util": util,
        "flash_attn": ModuleType("flash_attn"),
        **_rotary(),
    }


def _cute(root: Path) -> dict[str, ModuleType]:
    """Return modules that replace flash_attn.cute."""
    names = ("", ".cute", ".cute.interface", ".cute.cache_utils")
    modules = {f"flash_attn{name}": ModuleType(f"flash_attn{name}") for name in names}
    package, interface = modules["flash_attn.cute"], modules["flash_attn.cute.interface"]
    for name in flash_attn_cute.__all__:
        setattr(package, name, getattr(flash_attn_cute, name))
        setattr(interface, name, getattr(flash_attn_cute, name))
    package.interface = interface
    for name in ("fwd", "bwd", "bwd_sparse_mla", "fwd_combine"):
        setattr(interface, f"_flash_attn_{name}", _private)
    modules["flash_attn.cute.cache_utils"].JITCache = dict
    testing = _file(root / TESTING, "flash_attn.cute.testing")
    return {**modules, "flash_attn.cute.testing": testing, **_rotary()}


def _private(*_: Any, **__: Any) -> None:
    raise NotApplicable("it calls a private function of flash_attn.cute")


def _file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rotary() -> dict[str, ModuleType]:
    layers, rotary = (ModuleType(f"flash_attn.layers{end}") for end in ("", ".rotary"))
    vars(rotary).update(apply_rotary_emb=turned)
    return {"flash_attn.layers": layers, "flash_attn.layers.rotary": rotary}


def turned(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: Any = None,
) -> torch.Tensor:
    """Rotate (batch, n, heads, d) as complex numbers, as flash_attn.layers.rotary documents."""
    assert cu_seqlens is None, "of packed sequences it is not asked"
    half, n = cos.shape[1], x.shape[1]
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1).long()
    at = offsets + torch.arange(n, device=x.device)
    angle = torch.complex(cos[at].float(), sin[at].float())[:, :, None]
    head, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    pairs = head.unflatten(-1, (half, 2)) if interleaved else torch.stack(head.chunk(2, -1), -1)
    done = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    head = done.flatten(-2) if interleaved else torch.cat((done[..., 0], done[..., 1]), -1)
    return torch.cat((head.to(x.dtype), rest), -1)
