"""The `flashsim` command: prints tables for people, and JSON or CSV for programs.

A command's module is imported only when the command is called. So `flashsim --help` takes its texts
from the list `COMMANDS`.
"""

import errno
import importlib
import re
import textwrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flashsim.errors import FlashSimError, OptionError, choices, printable
from flashsim.version import __version__

#: A command's one-line help, and its module in this package or its sub-commands. A function that
#: is not named as its command is given as "module.function".
_Entries = dict[str, tuple[str, "str | _Entries"]]

COMMANDS: _Entries = {
    "run": ("Run attention tile by tile and show the bytes it moves.", "attention"),
    "compare": ("Compare algorithms side by side: bytes, FLOPs, on-chip memory.", "attention"),
    "count": ("Count the bytes and FLOPs of attention by formula, at any size.", "attention"),
    "sweep": ("Count many sizes, tiles and GPUs into one table.", "attention"),
    "plot": ("Draw one plot: PNG, SVG or PDF.", "pictures"),
    "animate": ("Animate one trace, or two side by side: GIF, MP4 or HTML.", "pictures"),
    "page": ("Write an HTML page that plays one trace, or two.", "pictures"),
    "lab": ("Write an HTML page of sliders that counts any problem.", "pictures"),
    "trace": (
        "Show or convert saved traces.",
        {
            "show": ("Show the contents of a saved trace.", "attention.trace_show"),
            "perfetto": (
                "Convert a trace for https://ui.perfetto.dev.",
                "attention.trace_perfetto",
            ),
        },
    ),
    "roofline": ("Tell whether memory or arithmetic limits attention on a GPU.", "predictions"),
    "predict": ("Predict the time of flashsim's GPU kernels. Needs no GPU.", "predictions"),
    "verify": ("Compare predicted bytes with a GPU's hardware counters.", "predictions"),
    "watch": ("Run a PyTorch program and count its attention calls.", "watch"),
    "xray": ("Find the tile sizes of a program's kernels from GPU counters.", "xray"),
    "kernel": ("Check your Triton or Pallas kernel on a CPU, and count its bytes.", "kernels"),
    "exercise": (
        "Exercises that are graded by results and bytes moved.",
        {
            "list": ("List the exercises, in the order of the course.", "exercises.listed"),
            "start": ("Write a file with the task and a skeleton to fill in.", "exercises"),
            "hint": ("Show a hint; later hints tell more.", "exercises"),
            "grade": ("Grade a solution: points out of 100, with reasons.", "exercises"),
            "reveal": ("Print a reference solution.", "exercises"),
            "check": ("Check an exercise that you wrote.", "exercises"),
            "predict": ("Guess how many bytes move, then see the answer.", "exercises"),
        },
    ),
    "study": (
        "More studies: walkthroughs, rounding, tile sizes, many GPUs, papers.",
        {
            "demo": ("Run a real model's tensors and check the output.", "studies"),
            "walkthrough": ("Follow small numbers step by step.", "studies"),
            "ladder": ("Go from a naive softmax to FlashAttention, step by step.", "studies"),
            "softmax-matmul": (
                "Count the bytes of softmax(X) V, as one kernel and as two.",
                "studies",
            ),
            "precision": ("Measure the error that each rounding adds, against float64.", "studies"),
            "banks": ("Count shared-memory bank conflicts of tile layouts.", "studies"),
            "blocks": ("Compare tile sizes: bytes, occupancy and predicted time.", "studies"),
            "when": ("Find the length from which FlashAttention is faster.", "studies"),
            "versions": ("Compare FlashAttention-1, -2 and -3 with standard attention.", "studies"),
            "dram": ("Predict DRAM bytes with a model of the L2 cache.", "predictions"),
            "ring": ("Count attention that is spread over several GPUs.", "predictions"),
            "devices": ("List the GPUs, with the source of each figure.", "studies"),
            "calibrate": ("Measure the speed of each unit of this GPU.", "predictions"),
            "reproduce": ("Recompute published numbers.", "studies"),
            "claims": ("Check statements of well-known texts by recomputing them.", "studies"),
            "warm": ("Compile the CPU engine ahead of time.", "studies"),
        },
    ),
}
#: The studies that once were commands of their own. A new study has no old name.
_STUDIES = "demo walkthrough ladder softmax-matmul precision banks blocks when versions dram ring"
_STUDIES += " devices calibrate reproduce claims warm"
#: Old names of commands, and their new names. Old names still work in this version, with a message.
MOVED = {name: f"study {name}" for name in _STUDIES.split()} | {"grade": "exercise grade"}
#: Commands whose first argument is a program. As for `python`, all words after it are its own.
RUNS_A_PROGRAM = ("watch", "xray")
#: Old names of options, for commands that have the new option but not the old one.
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
    typer.echo(f"flashsim: `{old}` is now `{new}`; the next version removes the old name", err=True)


#: The groups of options in a command's help, in order; options without a group come first.
PANELS = ("Sizes", "Mask and scores", "How", "L2 cache", "Output")
#: Lines and columns of a terminal in which help must fit.
SCREEN = (40, 80)
#: Options whose help begins with "NAME only: " share one line in the short help.
_SOME_ONLY = re.compile(r"[\w-]+(?= only: )")
_Options = list[tuple[str, str]]


class _Command(TyperCommand):
    """A command whose ``--help`` fits on one screen; ``--help-all`` explains every option."""

    explain_all = False

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        for option in params:
            if getattr(option, "is_flag", False):
                option.metavar = ""
        panels = (None, *PANELS)
        return sorted(params, key=lambda p: panels.index(getattr(p, "rich_help_panel", None)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for option in self.params for name in option.opts}
        words: list[str] = []
        self.explain_all = False
        for n, word in enumerate(args):
            program = self.name in RUNS_A_PROGRAM and not word.startswith("-")
            if word == "--" or program:  # the following arguments belong to another program
                words += args[n:]
                break
            if word == "--help-all":
                self.explain_all, word = True, "--help"
            name, equals, value = word.partition("=")
            new = RENAMED.get(name, ())
            if new and name not in known and new[0] in known:
                _moved(name, " ".join(new))
                words += [new[0] + equals + value, *new[1:]]
            else:
                words.append(word)
        return super().parse_args(ctx, words)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        full = ctx.make_formatter()
        super().format_help(ctx, full)
        text = full.getvalue()
        if not self.explain_all and len(text.splitlines()) > SCREEN[0]:
            text = self._short_help(ctx)
        formatter.write(text)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for panel, records in self._groups(ctx).items():
            with formatter.section(panel):
                formatter.write_dl(records)

    def _groups(self, ctx: Any) -> dict[str, _Options]:
        """Return, per group of options, a list of pairs (name and kind of value, help text)."""
        groups: dict[str, _Options] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None)
                if panel is None:
                    panel = "Options" if record[0].startswith("-") else "Arguments"
                groups.setdefault(panel, []).append(record)
        return groups

    def _short_help(self, ctx: Any) -> str:
        """Return help that fits on one screen: one line per option, or only the option's name."""
        about, groups = _sentence(self.help or ""), self._groups(ctx)
        shortest = ("L2 cache", "Mask and scores", "Output", "Sizes", "How")
        for n in range(len(shortest) + 1):
            formatter = ctx.make_formatter()
            self.format_usage(ctx, formatter)
            formatter.write(f"\n{textwrap.fill(about, formatter.width)}\n")
            for panel, records in groups.items():
                formatter.write(f"\n{panel}:\n")
                if panel == "Arguments":  # in full, because it lists the kinds of plots
                    with formatter.indentation():
                        formatter.write_dl(records)
                else:
                    _write_short(formatter, records, names_only=panel in shortest[:n])
            formatter.write(f"\n`{ctx.command_path} --help-all` explains every option in full.\n")
            text = str(formatter.getvalue())
            if len(text.splitlines()) <= SCREEN[0]:
                break
        return text


def _write_short(formatter: Any, records: _Options, *, names_only: bool) -> None:
    """Write one line per option."""
    together: dict[str, list[str]] = {}
    wide = 2 + max(len(name) for name, _ in records)
    for name, text in records:
        plain = name.split(", ")[-1].split()[0]  # the long name alone
        case = "" if names_only else _SOME_ONLY.match(text)
        if names_only or case:
            together.setdefault(f"{case[0]} only: " if case else "", []).append(plain)
        else:
            plain, _, default = text.partition("  [")
            room, about = formatter.width - 4 - wide, _sentence(plain)
            if len(about) > room:
                about = textwrap.shorten(about, room, placeholder=" ...")
            elif default and len(about) + 2 + len(default) <= room:
                about += f" [{default}"
            formatter.write(f"  {name:{wide}}{about}\n")
    wrap = textwrap.TextWrapper(formatter.width, "  ", "    ", break_on_hyphens=False)
    for case, names in together.items():
        formatter.write(wrap.fill(case + ", ".join(names)) + "\n")


def _sentence(text: str) -> str:
    """Return the first sentence of a text, on one line."""
    first = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[\w)]\.)\s(?=[A-Z])", first)[0]


class _Group(TyperGroup):
    """A group of commands, each imported when called; an error prints one line and exits with 2."""

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
            commands = importlib.import_module(f"flashsim.cli.{module}")
            called = getattr(commands, function or cmd_name.replace("-", "_"))
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            settings = {"allow_interspersed_args": cmd_name not in RUNS_A_PROGRAM}
            single.command(cmd_name, cls=_Command, context_settings=settings)(spread(called, show))
            return typer.main.get_command(single)
        group = _Group(name=cmd_name, help=about, no_args_is_help=True, rich_markup_mode=None)
        group.entries = where
        return group

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.entries is COMMANDS and args[:1] == ["--version"]:
            # Typer would import Pydantic first, which takes long.
            typer.echo(f"flashsim {__version__}")
            raise typer.Exit
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.entries is COMMANDS and args[0] in MOVED:
            _moved(f"flashsim {args[0]}", f"flashsim {MOVED[args[0]]}")
            args = [*MOVED[args[0]].split(), *args[1:]]
        if args[0] not in self.entries:
            raise OptionError(
                f"there is no command {args[0]!r}; choose from {choices(args[0], self.entries)}"
            )
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
