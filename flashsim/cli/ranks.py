"""The command about many GPUs: ring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashsim import distributed
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.output import ready, say, show_tables, working
from flashsim.distributed.group import SCHEMES
from flashsim.problem.links import LINKS

_LAYER = opt.Sizes(n_q=65536, head_dim=128, batch=1, heads=32, kv_heads=8, dtype="bfloat16")
_HOW = "How"


def ring(
    form: opt.Format,
    sizes: opt.Sizes = _LAYER,
    causal: Annotated[bool, typer.Option(help="Key k <= query.", rich_help_panel=_HOW)] = False,
    ranks: Annotated[int, typer.Option("--ranks", "-r", help="GPUs.", rich_help_panel=_HOW)] = 8,
    scheme: Annotated[
        str, typer.Option(help=f"One of {', '.join(SCHEMES)}.", rich_help_panel=_HOW)
    ] = "zigzag",
    ulysses: Annotated[
        int | None, typer.Option(help="usp: ranks that exchange heads.", rich_help_panel=_HOW)
    ] = None,
    backward: Annotated[
        bool, typer.Option(help="The backward pass instead.", rich_help_panel=_HOW)
    ] = False,
    algorithm: opt.Algorithm = "flash2-fused",
    rank: Annotated[
        int | None, typer.Option(help="Show this rank step by step.", rich_help_panel="Output")
    ] = None,
    device: Annotated[str, typer.Option(help="See `flashsim devices`.")] = "H200",
    link: Annotated[
        str | None, typer.Option(help=f"In a host; the device's. {', '.join(LINKS)}.")
    ] = None,
    network: Annotated[str, typer.Option(help="Between hosts, likewise.")] = "InfiniBand NDR",
    host: Annotated[int, typer.Option(help="GPUs of a host.")] = 8,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Animation to write: .gif, .mp4 or .html.",
            rich_help_panel="Output",
        ),
    ] = None,
) -> None:
    """Spread attention over GPUs: what each holds, sends and computes, and how long it takes."""
    from flashsim.studies.predict import spread

    ready(out, (".gif", ".mp4", ".html"))
    problem = values.problem(sizes, opt.Scores(causal=causal))
    direction = "backward" if backward else "forward"
    found = spread(
        problem,
        ranks=ranks,
        scheme=scheme,
        ulysses=ulysses,
        direction=direction,
        algorithm=algorithm,
        device=device,
        link=link,
        network=network,
        host=host,
    )
    account: distributed.Account = found.account
    tables = [account.table() if rank is None else account.rank_table(rank), found.table()]
    show_tables(tables, tables[:1], form)  # programs get what was counted
    if out is not None:
        from flashsim import viz

        with working("drawing frames"):
            viz.animate_ranks(account, out)
        say(f"animation in {out}")
