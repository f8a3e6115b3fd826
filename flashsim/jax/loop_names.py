"""Find, in the user's source, the names of the values that a kernel's loop carries."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any


@functools.cache
def unpacked_names(told: str) -> tuple[str, ...]:
    """Return the names in a loop body's line ``m, l, acc = carry``, or () without such a line."""
    found = re.fullmatch(r"\S+ at (.*):(\d+)", told)
    if found is None:
        return ()
    try:
        tree = ast.parse(Path(found[1]).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.lineno == int(found[2]):
            for line in node.body:
                if (
                    isinstance(line, ast.Assign)
                    and isinstance(line.targets[0], ast.Tuple)
                    and ast.unparse(line.value) == node.args.args[-1].arg
                ):
                    return tuple(ast.unparse(one) for one in line.targets[0].elts)
    return ()


def carried_names(jaxpr: Any, first: int, count: int) -> list[str]:
    """Return each carried value's name: the user's name, else JAX's name, else "carry 0"."""
    info = getattr(jaxpr, "debug_info", None)
    known = list(getattr(info, "arg_names", None) or ())[first : first + count]
    names = [str(name) for name in known] + [""] * (count - len(known))
    names = [name or f"carry {n}" for n, name in enumerate(names)]
    own = unpacked_names(str(getattr(info, "func_src_info", "") or ""))
    if own and len(own) <= count:
        names[count - len(own) :] = own
    return names
