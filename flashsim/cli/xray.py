"""The `flashsim xray` command: find the tile sizes of a program's kernels from GPU counters."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.declare import Format, of_program, option, refuse_unused
from flashsim.cli.output import draw, ready, ready_to_draw, say, show, working
from flashsim.errors import OptionError
from flashsim.report import Table


def xray(
    typed: typer.Context,
    form: Format,
    mask: opt.Mask,
    program: Annotated[
        Path | None, typer.Argument(help="The Python program to run.", exists=True, dir_okay=False)
    ] = None,
    arguments: list[str] | None = typer.Argument(
        None, help="The program's own arguments: all words after the program."
    ),
    sizes: opt.Sizes = opt.Sizes(),
    direction: str = option(
        "forward", "With --kernel: the pass that it computes, forward or backward."
    ),
    kernel: str | None = option(
        None,
        "Measure kernels whose names match this regular expression; the other options set their "
        "shape. Use it for kernels that `flashsim watch` does not see.",
    ),
    device: str | None = option(
        None, "flashsim's device for the GPU. Default: the device that matches the GPU."
    ),
    launches: int = option(200, "The most kernels to measure."),
    save: Path | None = option(None, "Save the measurements, which --from reads on any machine."),
    from_: Path | None = option(None, "Read a file that --save wrote, instead of measuring."),
    plot: Path | None = option(
        None, "Also plot the measured bytes that identify the tile sizes: PNG, SVG or PDF."
    ),
    page: Path | None = option(None, "Also write a report as an HTML page."),
) -> None:
    """Measure the bytes that a program's attention kernels move, and infer the kernels' tile sizes.

    The command runs the program under Nsight Compute, on an NVIDIA GPU. By default, the command
    measures the attention calls that `flashsim watch` sees. To measure any other kernel, pass its
    name with --kernel, and the problem's sizes.
    """
    from flashsim.studies import xray as studies

    ready_to_draw(plot)
    ready(page, (".html",))
    ready(save)
    if (program is None) == (from_ is None):
        raise OptionError(
            "pass either a program to run, or --from FILE with a file that --save wrote"
        )
    if from_ is not None:
        refuse_unused(typed, "--from", only=["from_", "plot", "page", "device"])
        try:
            record = studies.Profile.load(from_)
        except OSError as error:
            raise OptionError(f"cannot read {str(from_)!r}: {error.strerror}") from None
        record = record if device is None else replace(record, device=device)
    else:
        assert program is not None
        words = of_program(typed, arguments)
        with working("measuring: each kernel runs several times"):
            if kernel is None:
                unused = [*vars(sizes), *vars(mask), "direction"]
                refuse_unused(typed, "a program whose calls are seen", never=unused)
                record = studies.measure(program, words, device=device, launches=launches)
            else:
                if sizes.n_q is None:
                    raise OptionError(
                        "--kernel needs the kernel's shape: pass -n, -d, --heads, ... as for count"
                    )
                shape = values.problem(replace(opt.LAYER, **sizes.given()), mask)
                record = studies.measure_kernels(
                    program, words, shape, direction,
                    kernel=kernel, device=device, launches=launches,
                )  # fmt: skip
    if save is not None:
        record.save(save)
        say(f"measurements in {save}")
    seen = studies.XRay(record)
    if page is not None:
        seen.page(page)
        say(f"page in {page}")
    if plot is not None:
        draw("tile-evidence", seen.evidence(), plot, {})
    tables: tuple[list[Table], list[Table]] = ([seen.table()], [seen.full_table()])
    show(tables, form)
