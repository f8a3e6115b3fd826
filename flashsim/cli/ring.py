"""The `flashsim study ring` command: attention distributed over several GPUs."""

from __future__ import annotations

from pathlib import Path

from flashsim import distributed
from flashsim.cli import options as opt
from flashsim.cli import values
from flashsim.cli.output import Tables, ready, say, viz, working
from flashsim.distributed.group import SCHEMES
from flashsim.problem.links import LINKS

_LAYER = opt.Sizes(n_q=65536, head_dim=128, batch=1, heads=32, kv_heads=8, dtype="bfloat16")
_HOW = "How"


def ring(
    sizes: opt.Sizes = _LAYER,
    causal: opt.Causal = False,
    ranks: int = opt.option(8, "Number of GPUs (ranks).", "-r", panel=_HOW),
    scheme: str = opt.option(
        "zigzag", f"How the work is distributed: {', '.join(SCHEMES)}.", panel=_HOW
    ),
    ulysses: int | None = opt.option(
        None, "usp only: number of GPUs that exchange heads with each other.", panel=_HOW
    ),
    direction: opt.Direction = "forward",
    algorithm: opt.Algorithm = "flash2-fused",
    rank: int | None = opt.option(None, "Show the steps of this rank (GPU).", panel=opt.OUTPUT),
    device: opt.Device = "H200",
    link: str | None = opt.option(
        None, f"Link inside a host: {', '.join(LINKS)}. Default: the device's.", panel=_HOW
    ),
    network: str = opt.option(
        "InfiniBand NDR", "Link between hosts; the names are those of --link.", panel=_HOW
    ),
    host: int = opt.option(8, "Number of GPUs per host.", panel=_HOW),
    out: Path | None = opt.option(
        None, "Animation to write: .gif, .mp4 or .html.", "-o", panel=opt.OUTPUT
    ),
) -> Tables:
    """Count what each of several GPUs holds, sends and computes for attention; predict the time."""
    from flashsim.studies.predict import spread

    ready(out, (".gif", ".mp4", ".html"))
    problem = values.problem(sizes, opt.Scores(causal=causal))
    prediction = spread(
        problem,
        ranks=ranks,
        scheme=scheme,
        ulysses=ulysses,
        direction=opt.one_pass(direction),
        algorithm=algorithm,
        device=device,
        link=link,
        network=network,
        host=host,
    )
    account: distributed.Account = prediction.account
    tables = [account.table() if rank is None else account.rank_table(rank), prediction.table()]
    if out is not None:
        with working("drawing frames"):
            viz().animate_ranks(account, out)
        say(f"animation in {out}")
    return tables, tables[:1]  # --json and --csv print only the counts
