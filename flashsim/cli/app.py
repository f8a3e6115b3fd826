"""The `flashsim` command: it prints tables for people, ``--json`` and ``--csv`` for programs.

A command's module is imported only when the command is called: `flashsim --help` reads the list
below.
"""

from __future__ import annotations

import errno
import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flashsim.errors import FlashSimError, OptionError, choices, printable
from flashsim.version import __version__

#: What is printed about a command, and where it is: "module.function" here, or sub-commands.
_Entries = dict[str, tuple[str, "str | _Entries"]]

COMMANDS: _Entries = {
    "run": ("Run attention tile by tile and show what it moves.", "attention.run"),
    "compare": ("Run several algorithms on the same tensors, side by side.", "attention.compare"),
    "count": ("Count what a run would move, by formula: any size.", "attention.count"),
    "sweep": ("Count every combination of lists of values.", "attention.sweep"),
    "plot": ("Draw one plot: PNG, SVG or PDF.", "pictures.plot"),
    "animate": ("Animate one trace, or two side by side: GIF, MP4 or HTML.", "pictures.animate"),
    "page": ("Write an HTML page that plays one trace, or two.", "pictures.page"),
    "lab": ("Write an HTML page of sliders that counts any problem.", "pictures.lab"),
    "trace": (
        "Look into saved traces.",
        {
            "show": ("Show what a saved trace holds.", "traces.show"),
            "perfetto": ("Convert a trace for https://ui.perfetto.dev.", "traces.perfetto"),
        },
    ),
    "roofline": ("Compare intensity with a GPU's ridge points.", "predictions.roofline"),
    "predict": ("Predict how long our GPU kernels take. Needs no GPU.", "predictions.predict"),
    "verify": ("Compare predictions with hardware counters.", "predictions.verify"),
    "watch": ("Count the attention calls of a PyTorch program.", "watch.watch"),
    "xray": ("Infer the tiles of a program's kernels from counters.", "xray.xray"),
    "kernel": ("Run your Triton kernel on a CPU: right? what does it move?", "kernels.kernel"),
    "exercise": (
        "A course of exercises, graded by bytes.",
        {
            "list": ("List the exercises, in the order of the course.", "exercises.listed"),
            "start": ("Write the file to fill in: task and skeleton.", "exercises.start"),
            "hint": ("Show a hint: 1 is small, the last is nearly all.", "exercises.hint"),
            "grade": ("Grade a solution, in words and points of 100.", "exercises.grade"),
            "reveal": ("Print a reference solution.", "exercises.reveal"),
            "check": ("Check an exercise of your own.", "exercises.check"),
            "predict": ("Guess how many bytes move, then see.", "exercises.predict"),
        },
    ),
    "study": (
        "Studies: step by step, on chip, on many GPUs, of papers.",
        {
            "demo": ("Run a real model's tensors and check the output.", "studies.demo"),
            "walkthrough": ("Follow small numbers step by step.", "studies.walkthrough"),
            "ladder": ("From a naive softmax to FlashAttention, by rungs.", "studies.ladder"),
            "softmax-matmul": ("softmax(X) V, as one kernel and as two.", "studies.softmax_matmul"),
            "precision": ("What each rounding costs, against float64.", "studies.precision"),
            "banks": ("Bank conflicts of a tile's layouts.", "studies.banks"),
            "blocks": ("Tile sizes: bytes, occupancy and predicted time.", "studies.blocks"),
            "when": ("When does FlashAttention win? Times over N.", "studies.when"),
            "versions": ("FlashAttention-1, -2 and -3 beside standard.", "studies.versions"),
            "dram": ("Predict DRAM bytes with a model of the L2 cache.", "predictions.dram"),
            "ring": ("Attention spread over several GPUs.", "ring.ring"),
            "devices": ("List the GPUs, with the source of each figure.", "studies.devices"),
            "calibrate": ("Measure what each unit of this GPU does.", "predictions.calibrate"),
            "reproduce": ("Recompute published numbers.", "studies.reproduce"),
            "claims": ("Recompute statements of well-known texts.", "studies.claims"),
            "warm": ("Compile the CPU engine ahead of time.", "studies.warm"),
        },
    ),
}
#: What commands were called before: they work for one version more, and say the new name.
MOVED = {name: f"study {name}" for name in COMMANDS["study"][1]} | {"grade": "exercise grade"}
#: Likewise options, where a command has the new one and not the old one.
RENAMED = {
    "-n": ("--number",),
    "--algorithms": ("--algorithm",),
    "--backward": ("--direction", "backward"),
    "--kernels": ("--published",),
    "--lengths": ("--n-q",),
    "--limit": ("--timeout",),
    "--n": ("--n-q",),
    "--output": ("--out",),
    "--picture": ("--plot",),
}


def _moved(old: str, new: str) -> None:
    typer.echo(
        f"flashsim: `{old}` is now `{new}`; the old name goes with the next version", err=True
    )


class _Command(TyperCommand):
    """A command whose help shows no value for flags, since they take none."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        for option in params:
            if getattr(option, "is_flag", False):
                option.metavar = ""
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for option in self.params for name in option.opts}
        words: list[str] = []
        for n, word in enumerate(args):
            if word == "--":  # what follows is another program's
                words += args[n:]
                break
            name, equals, value = word.partition("=")
            new = RENAMED.get(name, ())
            if new and name not in known and new[0] in known:
                _moved(name, " ".join(new))
                words += [new[0] + equals + value, *new[1:]]
            else:
                words.append(word)
        return super().parse_args(ctx, words)


class _Group(TyperGroup):
    """A group that imports its commands when called; errors give one line and exit code 2."""

    entries: _Entries = COMMANDS

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.entries]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.entries:
            return None
        about, where = self.entries[cmd_name]
        if isinstance(where, str):
            from flashsim.cli.declare import spread
            from flashsim.cli.output import show

            module, _, function = where.partition(".")
            called = getattr(importlib.import_module(f"flashsim.cli.{module}"), function)
            single = typer.Typer(add_completion=False)
            single.command(cmd_name, cls=_Command)(spread(called, show))
            return typer.main.get_command(single)
        group = _Group(name=cmd_name, help=about, no_args_is_help=True, rich_markup_mode=None)
        group.entries = where
        return group

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.entries is COMMANDS and args[:1] == ["--version"]:
            # Typer would load Pydantic first, to read a flag.
            typer.echo(f"flashsim {__version__}")
            raise typer.Exit
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.entries is COMMANDS and args[0] in MOVED:
            _moved(f"flashsim {args[0]}", f"flashsim {MOVED[args[0]]}")
            args = [*MOVED[args[0]].split(), *args[1:]]
        if args[0] not in self.entries:
            raise OptionError(f"no command {args[0]!r}; {choices(args[0], self.entries)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (about, _) in self.entries.items()])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlashSimError as error:
            typer.echo(f"flashsim: {printable(str(error))}", err=True)
        except OSError as error:
            if error.errno == errno.EPIPE:  # `flashsim ... | head`: click ends quietly
                raise
            typer.echo(f"flashsim: {printable(str(error))}", err=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Run FlashAttention tile by tile, and count every byte that it moves."""
