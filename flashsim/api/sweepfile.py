"""A CSV file that grows row by row, survives interruptions, and may have several writers."""

from __future__ import annotations

import codecs
import csv
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flashsim.errors import OptionError
from flashsim.report import Cell

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

Row = dict[str, Cell]
#: On Windows a locked byte cannot be read by others: a byte that no file of rows has.
_LOCKED_BYTE = 1 << 40


class SweepFile:
    """A CSV file with fixed columns; opening it again finds the rows written before.

    Each row is one line, written at once under a lock, so several processes can add rows. An
    interruption can truncate only the last line; the next writer drops a truncated line. A file
    with a byte order mark or CRLF, as spreadsheets save it, can be read; new rows keep its line
    endings.

    A missing or empty file gets the header `columns`. `parse` turns the text of one line,
    ``{column: text}``, back into a row, and raises ValueError for text that no row has. If the
    folder does not exist, or if the file has another header or an unreadable line, `OptionError` is
    raised and the file does not change.
    """

    def __init__(
        self,
        path: str | Path,
        columns: Sequence[str],
        parse: Callable[[Mapping[str, str]], Row],
    ) -> None:
        self.path, self.columns = Path(path), tuple(columns)
        folder, wrong = self.path.parent, ""
        with self._writing():
            if not folder.is_dir():
                wrong = f"the folder {folder} does not exist; create it, or name another file"
            elif self.path.is_dir():
                wrong = "it is a folder; pass the path of a file"
            elif self.path.exists() and not self.path.is_file():  # rows could not be read back
                wrong = "it is not a regular file; pass the path of a regular file"
            if wrong:
                raise OptionError(f"cannot write {self.path}: {wrong}")
            self._stream = self.path.open("a+b", buffering=0)
            try:
                with self._locked():
                    self._open(parse)
            except BaseException:
                self._stream.close()
                raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn the operating system's errors, such as a full disk, into `OptionError`."""
        try:
            yield
        except OSError as error:
            raise OptionError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _open(self, parse: Callable[[Mapping[str, str]], Row]) -> None:
        """Read the rows, drop a truncated line, and write the header if there is none."""
        self._stream.seek(0)
        content = self._stream.readall()
        text = content.removeprefix(codecs.BOM_UTF8)
        whole = text[: text.rfind(b"\n") + 1]
        if not whole and not self._header.encode().startswith(text.rstrip(b"\r")):
            raise self._foreign(content)
        self._end = "\r\n" if whole.split(b"\n", 1)[0].endswith(b"\r") else "\n"
        self.rows = self._read(whole, parse) if whole else []
        self._stream.truncate(len(content) - len(text) + len(whole))
        if not whole:
            self._write(self._header)

    def append(self, row: Row) -> None:
        """Append one row; raise `OptionError` if writing fails, for example on a full disk."""
        with self._writing(), self._locked():
            self._drop_truncated_line()
            self._write(_line([row[name] for name in self.columns]))

    def __enter__(self) -> SweepFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file inside the ``with`` block, so that no other process writes."""
        if sys.platform == "win32":
            self._stream.seek(_LOCKED_BYTE)
            msvcrt.locking(self._stream.fileno(), msvcrt.LK_LOCK, 1)
        else:
            fcntl.flock(self._stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if sys.platform == "win32":
                self._stream.seek(_LOCKED_BYTE)
                msvcrt.locking(self._stream.fileno(), msvcrt.LK_UNLCK, 1)
            else:
                fcntl.flock(self._stream, fcntl.LOCK_UN)

    def _drop_truncated_line(self) -> None:
        """Remove the incomplete last line that a killed process left."""
        size = self._stream.seek(0, os.SEEK_END)
        if not size:
            return
        self._stream.seek(size - 1)
        if self._stream.read(1) == b"\n":
            return
        self._stream.seek(0)
        self._stream.truncate(self._stream.readall().rfind(b"\n") + 1)

    @property
    def _header(self) -> str:
        return _line(self.columns)

    def _write(self, line: str) -> None:
        left = memoryview(line.replace("\n", self._end).encode())
        while left:  # at the file's end, wherever it was read before: it is open to append
            left = left[self._stream.write(left) :]

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
                f"{self.path}, line {1 + lines.line_num}, is not a row of a sweep ({error}); "
                "remove the line, or name another file"
            ) from None
        return rows

    def _foreign(self, content: bytes) -> OptionError:
        first = content.split(b"\n", 1)[0].decode(errors="replace")
        return OptionError(
            f"{self.path} is not the file of such a sweep: its first line is {first[:80]!r}, and "
            f"a sweep's begins with {self._header[:40]!r}; name another file, or remove this one"
        )


def _line(cells: Sequence[Cell]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
