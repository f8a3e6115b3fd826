"""Checks of a student's file before it runs: it must parse and use only what a solution needs."""

from __future__ import annotations

import ast
import re
import tokenize
from pathlib import Path

MODULES = {
    *("numpy", "math", "flashsim", "functools", "itertools", "typing", "dataclasses"),
    *("collections", "__future__"),
}
#: Names and attributes through which numbers could pass the machine by.
NAMES = {
    *("eval", "exec", "compile", "open", "globals", "locals", "vars", "getattr", "setattr"),
    *("delattr", "breakpoint", "input"),
}
ATTRIBUTES = {
    *("ctypeslib", "load", "save", "savez", "savetxt", "loadtxt", "memmap", "fromfile", "tofile"),
    *("lib", "core", "exercises", "engines", "algorithms", "api", "backends", "random"),
    # "{0._view}".format(tile), and modules that modules hold
    *("format", "format_map", "sys", "modules", "os", "gc", "inspect", "builtins", "types"),
}
#: ... but these are the machine's own verbs.
_VERBS = {"load"}


class Refused(Exception):
    """The file is refused and does not run; `kind` and the text give the reason."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def text_of(path: Path) -> str:
    """A file's text, decoded as Python decodes it: UTF-8 unless the file declares another encoding.

    Raises
    ------
    OSError, SyntaxError, UnicodeDecodeError
    """
    with tokenize.open(path) as file:
        return file.read()


def exercise_of(text: str) -> str | None:
    """The exercise that a file says it solves."""
    found = re.search(r"^# flashsim exercise: *(\S+)", text, re.M)
    return found[1] if found else None


def checked(text: str, name: str) -> ast.Module:
    """Parse the file, check it, and return its syntax tree.

    Raises
    ------
    Refused
        For a syntax error ("syntax"), or for code that bypasses the machine ("source").
    """
    try:
        tree = ast.parse(text, name)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        raise Refused("syntax", f"Python cannot read the file: {where}{error.args[0]}") from None
    for node in ast.walk(tree):
        found = _objection(node)
        if found:
            raise Refused("source", f"line {getattr(node, 'lineno', '?')}: {found}")
    return tree


def _objection(node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
        modules += [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        modules = []
    for module in modules:
        first, *rest = module.split(".")
        if first not in MODULES or set(rest) & ATTRIBUTES or any(x.startswith("_") for x in rest):
            return f"imports {module}; a solution needs numpy, math and flashsim alone"
    if isinstance(node, ast.Name) and (node.id in NAMES or node.id.startswith("__")):
        return f"uses {node.id}; a solution has no use for it"
    if isinstance(node, ast.MatchClass) and any(name.startswith("_") for name in node.kwd_attrs):
        return "matches a name with an underscore: those are the machine's own"
    if isinstance(node, ast.Attribute):
        outside = isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy", "flashsim")
        if node.attr.startswith("_"):
            return f"looks at .{node.attr}: names with an underscore are the machine's own"
        if node.attr in ATTRIBUTES - _VERBS or (outside and node.attr in ATTRIBUTES):
            return f"uses .{node.attr}; a solution has no use for it"
    return ""
