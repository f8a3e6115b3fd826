"""`sweep`: count many problems, tilings and machines into one table.

The points of a sweep (its combinations of values) are independent of each other, so any
`concurrent.futures` executor may run them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, as_completed, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashsim import report
from flashsim.api.cost import Estimate
from flashsim.api.sweep_point import (
    COLUMNS,
    METHODS,
    PARAMETERS,
    SAME,
    Key,
    SweepPoint,
    axis,
    key_of,
    measure,
    parse_row,
    points,
    seconds,
)
from flashsim.api.sweepfile import Row, SweepFile
from flashsim.errors import (
    DTypeError,
    OptionError,
    own_errors,
    reject_unknown,
    shown,
)
from flashsim.problem import checks
from flashsim.report import Cell


@own_errors
@dataclass(frozen=True, eq=False)
class Sweep:
    """The rows of a sweep, in the order of the sweep's lists; printing them shows one table.

    Attributes
    ----------
    rows : list of dict
        One per point, ``{column: value}`` with the columns `COLUMNS`. Bytes are summed over all
        heads, and `intensity` is FLOPs per requested byte. If a point's `status` is not "ok", its
        figures are None.
    """

    rows: list[Row]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def table(self) -> report.Table:
        """Return a short table of the parameters that vary between points, and of the counts.

        `csv`, `json`, `rows` and `dataframe` have every column and the full text of each status;
        the table's note has the first status that is not "ok".
        """
        told = [  # n_kv is left out if it is always n_q
            name
            for name in PARAMETERS
            if name not in SAME or any(row[name] != row[SAME[name]] for row in self.rows)
        ]
        vary = [name for name in told if len({row[name] for row in self.rows}) > 1]
        first = self.rows[0]
        fixed = (name for name in told if name not in vary and first[name])
        table = report.Table(
            ", ".join(f"{name} {report.format_cell(first[name])}" for name in fixed),
            (
                *(*vary, "tile", "load B", "store B", "reduce B", "requested B", "x compulsory"),
                *("FLOP/B", "peak SRAM B", "saved B", "workspace B", "status"),
            ),
        )
        for row in self.rows:
            table.rows.append([row[name] for name in vary] + _short_figures(row))
        failures = [row["status"] for row in self.rows if row["status"] != "ok"]
        if failures:
            table.note = f"{len(failures):,} of {len(self):,} points without figures: {failures[0]}"
            table.note += " · CSV and JSON output has every status" if len(failures) > 1 else ""
        return table

    def full_table(self) -> report.Table:
        """Return every column of every row, as `csv` and `json` write them."""
        return report.Table("sweep", COLUMNS, [[row[c] for c in COLUMNS] for row in self.rows])

    def csv(self) -> str:
        """Return all columns as CSV with a header line."""
        return self.full_table().csv()

    def json(self) -> str:
        """Return all columns as a JSON array of objects."""
        return self.full_table().json()

    def dataframe(self) -> Any:
        """Return all columns as a `pandas.DataFrame`, with NA for missing counts.

        Raises
        ------
        BackendUnavailable
            If pandas is not installed.
        """
        return report.dataframe(self.rows, list(COLUMNS)).convert_dtypes()

    def __repr__(self) -> str:
        failed = sum(row["status"] != "ok" for row in self.rows)
        return f"<Sweep: {len(self):,} points, {failed:,} without figures>"

    __str__ = report.text
    _repr_html_ = report.tabled


def _short_figures(row: Mapping[str, Any]) -> list[Cell]:
    status = str(row["status"]).split(":", 1)[0]
    if status != "ok":
        return [*[None] * 10, status]
    bytes_of = lambda name: row[f"{name}_bytes"]  # noqa: E731
    excess = round(bytes_of("requested") / bytes_of("compulsory"), 2)
    return [
        f"{row['block_q']} x {row['block_k']}",
        *(bytes_of(name) for name in ("load", "store", "reduce", "requested")),
        *(excess, row["intensity"]),
        *(bytes_of(name) for name in ("peak_sram", "saved", "workspace")),
        status,
    ]


@own_errors
def sweep(
    n_q: Any = None,
    *,
    n: Any = None,
    n_kv: Any = None,
    head_dim: Any = 64,
    head_dim_v: Any = None,
    batch: Any = 1,
    heads: Any = 1,
    kv_heads: Any = None,
    dtype: Any = "float32",
    causal: Any = False,
    window: Any = None,
    softcap: Any = 0.0,
    algorithm: Any = "flash2",
    direction: Any = "forward",
    tiling: Any = None,
    device: Any = "H100",
    sram_bytes: Any = None,
    key_order: Any = "ascending",
    method: str = "count",
    executor: Executor | None = None,
    path: str | Path | None = None,
    progress: bool = True,
    **unknown: Any,
) -> Sweep:
    """Count every combination of sizes, tiles, algorithms and machines.

    Each parameter from `n_q` to `key_order` is one value or a list (a range, an array). If a
    combination is impossible, for example because its tiles do not fit on chip, its `status` is the
    error, and counting goes on.

    Parameters
    ----------
    n_q, n_kv : int or list
        Query length, also called `n`; key length, or None for the same.
    head_dim, head_dim_v, batch, heads, kv_heads, dtype, causal, window, softcap
        As in `Problem`; a pair of integers is one window, a list of pairs several.
    algorithm, direction, device, key_order
        As in `count`.
    tiling : Tiling, str or None, or a list of them
        A tiling, a name of `Tiling.preset`, or "fit" or None for the default of `count`.
    sram_bytes : int or None, or a list of them
        On-chip capacity of one thread block, in bytes, instead of the device's own.
    method : {"count", "run"}
        "count" uses the closed form. "run" runs the simulator on random inputs, and returns the
        same figures.
    executor : concurrent.futures.Executor, optional
        Runs the points: a ``ProcessPoolExecutor``, or a Dask cluster's ``client.get_executor()``.
        Default: in this process, one after the other.
    path : path-like, optional
        A CSV file that gets each row as soon as it is ready. Points that are already in the file do
        not run again. So an interrupted sweep continues where it stopped, and a larger sweep reuses
        the rows of a smaller sweep. Other points in the file stay.
    progress : bool
        Print on stderr if the sweep will take more than a minute, and show a progress bar if
        stderr is a terminal.

    Returns
    -------
    Sweep

    Raises
    ------
    OptionError, DTypeError, UnknownArgumentError
        If an axis has no value or an impossible one, or the file was not written by a sweep.
    """
    arguments = locals()  # by name, for the axes
    reject_unknown(unknown, sweep.__kwdefaults__ or (), "sweep")
    checks.one_of("method", method, METHODS)
    if n_q is None and n is None:
        raise OptionError("sweep() needs the query lengths; pass n_q=, such as n_q=[1024, 2048]")
    if n_q is not None and n is not None:
        raise OptionError(
            "n= is another name of n_q=, so sweep() takes only one of them, got "
            f"n_q={shown(n_q)} and n={shown(n)}"
        )
    if path is not None:
        checks.path("path", path)
    checks.flag("progress", progress)
    if executor is not None and not isinstance(executor, Executor):
        raise DTypeError(
            f"executor must be a concurrent.futures.Executor, got {type(executor).__name__}; for "
            "a Dask client, pass client.get_executor()"
        )
    arguments["n_q"] = n if n_q is None else n_q
    axes = {name: axis(name, arguments[name]) for name in PARAMETERS if name != "method"}
    return Sweep(_collect(points(method, axes), executor, path, progress))


def _collect(
    wanted: list[SweepPoint], executor: Executor | None, path: str | Path | None, progress: bool
) -> list[Row]:
    """Return the rows of all points in order; write new rows to the file at once."""
    rows_by_key: dict[Key, Row] = {}
    with ExitStack() as stack:
        file = None
        if path is not None:
            file = stack.enter_context(SweepFile(path, COLUMNS, parse_row))
            rows_by_key = {key_of(row): row for row in file.rows}
        todo = [point for point in wanted if point.key not in rows_by_key]
        takes = Estimate(sum(map(seconds, todo)), 0)
        if progress and takes.seconds > 60:
            print(f"flashsim: sweeping {len(todo):,} points, {takes} of one core", file=sys.stderr)
        rows = map(measure, todo) if executor is None else _submit(todo, executor)
        for row in _track(rows, len(wanted), len(wanted) - len(todo), progress):
            if file is not None:
                file.append(row)
            rows_by_key[key_of(row)] = row
    return [rows_by_key[point.key] for point in wanted]


def _submit(todo: list[SweepPoint], executor: Executor) -> Iterator[Row]:
    """Submit all points to the executor; yield each row when it is ready, in any order."""
    futures = [executor.submit(measure, point) for point in todo]

    def results() -> Iterator[Row]:
        left = set(futures)
        failure = None
        try:
            for future in as_completed(futures):
                left.discard(future)
                failure = future.exception()
                if failure is not None:
                    break
                yield future.result()
        finally:  # after a failure or an interrupt, points that have not begun do not begin
            for future in left:
                future.cancel()
        begun = [future for future in left if not future.cancelled()]
        yield from (f.result() for f in wait(begun).done if f.exception() is None)
        if failure is not None:
            raise failure

    return results()


def _track(rows: Iterable[Row], total: int, done: int, progress: bool) -> Iterator[Row]:
    """Yield `rows` unchanged, and show a progress bar on a terminal."""
    if not (progress and sys.stderr.isatty()):
        yield from rows
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sweep", total=total, completed=done)
        for row in rows:
            yield row
            bar.advance(task)
