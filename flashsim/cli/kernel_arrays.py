"""Random inputs for a user's function that launches kernels, in the function's own layout."""

import ast
import functools
import inspect
import re
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim.api.samples import random_inputs
from flashsim.errors import OptionError
from flashsim.problem import checks, oracle
from flashsim.problem.problem import Problem


@dataclass
class KernelArrays:
    """Random inputs and right results, in the shapes and the library of the user's file."""

    problem: Problem
    library: str
    ndim: int | None
    layout: str | None
    seed: int

    def shape(self, axes: tuple[str, ...]) -> None:
        """Choose the number and the order of axes that no option gave, by the axes' names."""
        self.ndim = self.ndim or len(axes) or 4
        if self.ndim not in (2, 3, 4):
            raise OptionError(f"--ndim must be 2, 3 or 4, got {self.ndim}")
        if self.layout is not None and self.ndim != 4:
            raise OptionError(
                f"--layout orders four axes, but q has {self.ndim}; leave out --layout, or pass "
                "--ndim 4"
            )
        self.layout = self.layout or ("bnhd" if _heads_third(axes) else "bhnd")
        checks.one_of("--layout", self.layout, ("bhnd", "bnhd"))

    @functools.cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        """Random inputs, by their names in the papers."""
        x = random_inputs(self.problem, self.seed)
        return {"Q": x.q, "K": x.k, "V": x.v, "dO": x.dout}

    @functools.cached_property
    def results(self) -> dict[str, np.ndarray]:
        """The right results of the forward pass, and delta."""
        q, k, v, dout = self.inputs.values()
        out, lse = oracle.attention(q, k, v, self.problem)
        delta = (out * dout.astype(np.float64)).sum(axis=-1)
        rows = {"L": lse.astype(np.float32), "delta": delta.astype(np.float32)}
        return {"O": out.astype(q.dtype), **rows}

    def of(self, name: str) -> Any:
        """Return the input or result that the papers call by this name, such as "dO"."""
        if self.ndim == 2 and self.problem.batch * self.problem.heads > 1:
            raise OptionError(
                "q has two axes, so it has one batch entry and one head; pass --batch 1 --heads 1"
            )
        array = self.inputs[name] if name in self.inputs else self.results[name]
        if self.ndim in (2, 3):
            kept = array.shape[array.ndim - (1 if name in ("L", "delta") else 2) :]
            array = array.reshape(kept if self.ndim == 2 else (-1, *kept))
        elif self.layout == "bnhd" and array.ndim == 4:
            array = array.swapaxes(1, 2)
        return self.own(np.ascontiguousarray(array))

    def own(self, array: np.ndarray) -> Any:
        """Return an array converted to the library that the user's file uses."""
        if self.library == "numpy":
            return array
        import torch

        name = array.dtype.name
        if name == "bfloat16" or name in checks.FP8:  # from_numpy knows only NumPy's types
            return torch.from_numpy(array.astype(np.float32)).to(getattr(torch, name))
        return torch.from_numpy(array)


def axes_of(called: Any) -> tuple[str, ...]:
    """Return the names to which a function unpacks a shape, such as ``heads, n, d = q.shape``.

    If the function unpacks several shapes, the shape of q has priority. For a
    `torch.autograd.Function`, the names come from its `forward`.
    """
    from flashsim.own_kernels.names import paper_name

    called = forward_of(called) or called
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(called))))
    except (OSError, TypeError, SyntaxError):
        return ()
    found: list[tuple[bool, tuple[str, ...]]] = []
    nodes: list[ast.AST] = [*ast.iter_child_nodes(tree.body[0])]
    while nodes:
        node = nodes.pop()
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            nodes += ast.iter_child_nodes(node)  # a function inside has shapes of its own
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            target, array = node.targets[0], node.value.value
            if node.value.attr == "shape" and isinstance(target, ast.Tuple):
                words = tuple(ast.unparse(one) for one in target.elts)
                of_q = isinstance(array, ast.Name) and paper_name(array.id) == "Q"
                if 2 <= len(words) <= 4:
                    found.append((not of_q, words))
    return min(found, key=lambda one: one[0], default=(True, ()))[1]


def _heads_third(axes: tuple[str, ...]) -> bool:
    """Return whether the third of four names stands for heads: ``batch, seqlen, nheads, d``."""
    head = [bool(re.fullmatch(r"(n|num)?_?(q_?)?h(eads?)?(_?q)?", x, re.I)) for x in axes]
    return len(head) == 4 and head[2] and not head[1]


def forward_of(called: Any) -> Any:
    """Return the `forward` of a `torch.autograd.Function`, given its `apply`; else None."""
    owner = called.__self__ if getattr(called, "__name__", "") == "apply" else None
    return getattr(owner, "forward", None) if isinstance(owner, type) else None
