"""A CSV file that grows row by row and survives being interrupted at any moment."""

from __future__ import annotations

import codecs
import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from flashsim.errors import OptionError
from flashsim.report import Cell

Row = dict[str, Cell]


class SweepFile:
    """Rows on disk with fixed columns; opening the file again finds its rows.

    Each row is one line, written and flushed at once, so an interruption can truncate only the last
    line. Opening the file drops a truncated line. A file that a spreadsheet or an editor saved with
    a byte order mark or with CRLF can be read; new rows keep its line endings.

    Parameters
    ----------
    path : path-like
        Created, with a header, if it does not exist or is empty.
    columns : sequence of str
        The header.
    parse : callable
        Turns the text of one line, ``{column: text}``, back into a row; raises ValueError for
        text that no row has.

    Raises
    ------
    OptionError
        If the folder does not exist, or the file is of another kind (another header, or a line
        that does not parse). The file is left as it was.
    """

    def __init__(
        self,
        path: str | Path,
        columns: Sequence[str],
        parse: Callable[[Mapping[str, str]], Row],
    ) -> None:
        self.path, self.columns = Path(path), tuple(columns)
        if not self.path.parent.is_dir():
            raise OptionError(f"cannot write {self.path}: there is no folder {self.path.parent}")
        if self.path.is_dir():
            raise OptionError(f"cannot write {self.path}: it is a folder; name a file")
        there = self.path.exists()
        if there and not self.path.is_file():  # /dev/null, a pipe: no row would be found again
            raise OptionError(f"cannot write {self.path}: it is no regular file; name a file")
        try:
            content = self.path.read_bytes() if there else b""
            text = content.removeprefix(codecs.BOM_UTF8)
            whole = text[: text.rfind(b"\n") + 1]
            if not whole and not self._header.encode().startswith(text.rstrip(b"\r")):
                raise self._foreign(content)
            self._end = "\r\n" if whole.split(b"\n", 1)[0].endswith(b"\r") else "\n"
            self.rows = self._read(whole, parse) if whole else []
            self._stream = self.path.open("r+b" if there else "x+b")
        except OSError as error:
            raise OptionError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._stream.truncate(len(content) - len(text) + len(whole))
        self._stream.seek(0, os.SEEK_END)
        if not whole:
            self._write(self._header)

    def append(self, row: Row) -> None:
        """Append one row and flush it."""
        self._write(_line([row[name] for name in self.columns]))

    def __enter__(self) -> SweepFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream.close()

    @property
    def _header(self) -> str:
        return _line(self.columns)

    def _write(self, line: str) -> None:
        self._stream.write(line.replace("\n", self._end).encode())
        self._stream.flush()

    def _read(self, whole: bytes, parse: Callable[[Mapping[str, str]], Row]) -> list[Row]:
        first, _, rest = whole.partition(b"\n")
        if first.removesuffix(b"\r") != self._header.rstrip("\n").encode():
            raise self._foreign(whole)
        rows = []
        lines = csv.reader(io.StringIO(rest.decode(errors="replace"), newline=""))
        try:
            for cells in lines:
                rows.append(parse(dict(zip(self.columns, cells, strict=True))))
        except (ValueError, csv.Error) as error:
            raise OptionError(
                f"{self.path}, line {1 + lines.line_num}: not a row of a sweep ({error}); remove "
                "the line, or give another file"
            ) from None
        return rows

    def _foreign(self, content: bytes) -> OptionError:
        first = content.split(b"\n", 1)[0].decode(errors="replace")
        return OptionError(
            f"{self.path} is not the file of such a sweep: its first line is {first[:80]!r}, and "
            f"a sweep's begins with {self._header[:40]!r}; give another file, or remove this one"
        )


def _line(cells: Sequence[Cell]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
