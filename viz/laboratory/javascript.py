"""Translate Python functions and named tuples of plain integer arithmetic to JavaScript.

Each Python statement becomes one JavaScript statement. Only the syntax that the package's
arithmetic uses is supported; anything else raises an `UnsupportedError`, so no line of code is
dropped silently. Integers become JavaScript numbers, which are exact up to 2**53.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from flashsim.errors import UnsupportedError

#: Helper functions that the translated code calls.
PRELUDE = """\
const floordiv = (a, b) => Math.floor(a / b);
const modulo = (a, b) => a - b * Math.floor(a / b);
const divmod = (a, b) => [floordiv(a, b), modulo(a, b)];
const max = (of) => Math.max(...of);
const min = (of) => Math.min(...of);
const range = (from, to) => Array.from({ length: Math.max(to - from, 0) }, (_, n) => from + n);
const enumerate = (of, from) => of.map((one, n) => [from + n, one]);
const next = (of) => of[0];
const sorted = (of) => [...of].sort((one, two) => one - two);
"""
_CALLS = ("divmod", "max", "min", "range", "enumerate", "next", "sorted")
_COMPARE: dict[type, str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "===", ast.NotEq: "!==",
}  # fmt: skip
_BINARY: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def translated(*things: Callable[..., Any]) -> str:
    """Return the JavaScript translation of Python functions and named tuples."""
    functions = []
    for thing in things:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
        functions.append(_class(node) if isinstance(node, ast.ClassDef) else _function(node))
    return "\n".join(functions)


def _class(node: ast.ClassDef) -> str:
    fields = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign)]  # type: ignore[union-attr]
    body = "".join(f" this.{name} = {name};" for name in fields)
    methods = [
        _function(x, "get " * bool(x.decorator_list))
        for x in node.body
        if isinstance(x, ast.FunctionDef)
    ]
    start = f"class {node.name} {{\nconstructor({', '.join(fields)}) {{{body} }}\n"
    return start + "\n".join(methods) + "\n}"


def _function(node: ast.stmt, kind: str = "function ") -> str:
    if not isinstance(node, ast.FunctionDef):
        raise _unknown(node)
    names = [x.arg for x in node.args.args]
    kind = "" if names[:1] == ["self"] and kind == "function " else kind
    body = node.body[ast.get_docstring(node) is not None :]
    local = sorted({name for x in ast.walk(node) for name in _assigned(x)} - set(names))
    declared = f"let {', '.join(local)};\n" if local else ""
    names = [name for name in names if name != "self"]
    return f"{kind}{node.name}({', '.join(names)}) {{\n{declared}{_block(body)}}}"


def _assigned(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]


def _block(body: list[ast.stmt]) -> str:
    return "".join(_statement(x) + "\n" for x in body)


def _statement(node: ast.stmt) -> str:
    match node:
        case ast.Return(value=ast.expr() as value):
            return f"return {_value(value)};"
        case ast.Assign(targets=[target], value=value):
            start = ";" if isinstance(target, ast.Tuple) else ""
            return f"{start}{_value(target)} = {_value(value)};"
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in _BINARY:
            return f"{_value(target)} {_BINARY[type(op)]}= {_value(value)};"
        case ast.If(test=test, body=body, orelse=rest):
            other = f" else {{\n{_block(rest)}}}" if rest else ""
            return f"if ({_value(test)}) {{\n{_block(body)}}}{other}"
        case ast.For(target=target, iter=over, body=body, orelse=[]):
            return f"for (const {_value(target)} of {_value(over)}) {{\n{_block(body)}}}"
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=of, attr="append"), args=[one])):
            return f"{_value(of)}.push({_value(one)});"
        case ast.While(test=test, body=body, orelse=[]):
            return f"while ({_value(test)}) {{\n{_block(body)}}}"
    raise _unknown(node)


def _value(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=int() | float() as value):
            return repr(value)
        case ast.Name(id=name):
            return "this" if name == "self" else name
        case ast.Attribute(value=value, attr=name):
            return f"{_value(value)}.{name}"
        case ast.Subscript(value=value, slice=index):
            return f"{_value(value)}[{_value(index)}]"
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return f"[{', '.join(map(_value, parts))}]"
        case ast.Starred(value=value):
            return f"...{_value(value)}"
        case ast.Set(elts=parts):
            return f"[...new Set([{', '.join(map(_value, parts))}])]"
        case ast.UnaryOp(op=ast.USub(), operand=value):
            return f"-({_value(value)})"
        case ast.UnaryOp(op=ast.Not(), operand=value):
            return f"!({_value(value)})"
        case ast.BinOp(left=one, op=ast.FloorDiv(), right=two):
            return f"floordiv({_value(one)}, {_value(two)})"
        case ast.BinOp(left=one, op=ast.Mod(), right=two):
            return f"modulo({_value(one)}, {_value(two)})"
        case ast.BinOp(left=one, op=op, right=two) if type(op) in _BINARY:
            return f"({_value(one)} {_BINARY[type(op)]} {_value(two)})"
        case ast.BoolOp(op=op, values=values):
            sign = " && " if isinstance(op, ast.And) else " || "
            return f"({sign.join(map(_value, values))})"
        case ast.Compare(left=one, ops=[op], comparators=[two]) if type(op) in _COMPARE:
            return f"({_value(one)} {_COMPARE[type(op)]} {_value(two)})"
        case ast.IfExp(test=test, body=one, orelse=two):
            return f"({_value(test)} ? {_value(one)} : {_value(two)})"
        case (
            ast.ListComp(elt=item, generators=[over])
            | ast.GeneratorExp(elt=item, generators=[over])
        ):
            name = _value(over.target)
            kept = "".join(f".filter(({name}) => {_value(x)})" for x in over.ifs)
            return f"{_value(over.iter)}{kept}.map(({name}) => {_value(item)})"
        case ast.Call(func=ast.Attribute() as function, args=given, keywords=[]):
            return f"{_value(function)}({', '.join(map(_value, given))})"
        case ast.Call(func=ast.Name(id=("max" | "min") as name), args=[_, _, *_], keywords=[]):
            return f"Math.{name}({', '.join(map(_value, node.args))})"
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if (
            name in _CALLS or name.startswith("_")
        ):
            return f"{name}({', '.join(map(_value, given))})"
    raise _unknown(node)


def _unknown(node: ast.AST) -> UnsupportedError:
    return UnsupportedError(
        f"the lab does not translate `{ast.unparse(node)}` to JavaScript: write it with integers, "
        "tuples, if and while, or teach flashsim.viz.laboratory.javascript"
    )
