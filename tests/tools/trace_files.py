"""Rewrites a trace file, with sound checksums and a sound directory."""

import json
import re

import numpy as np
import pytest

from flashsim import Trace, TraceError


def rewritten(path, *, header=None, arrays=None, drop=()):
    """Write an archive again without the arrays `drop`, after changing its header and arrays.

    The function `header` changes the header in place. `arrays` contains new arrays, or is a
    function that returns them for the old ones.
    """
    with np.load(path) as archive:
        old = {name: archive[name] for name in archive.files if name not in drop}
    said = json.loads(old.pop("header").tobytes())
    if header is not None:
        header(said)
    new = arrays(old) if callable(arrays) else arrays or {}
    text = np.frombuffer(json.dumps(said).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez_compressed(file, **{"header": text, **old, **new})


def headers(table):
    """Return the entries ``place = value -> text`` of a table, one a line, each place as a path."""
    entries = [re.split(" = | -> ", line, maxsplit=2) for line in table.strip().splitlines()]
    return [
        pytest.param([int(x) if x.isdigit() else x for x in place.split(".")], eval(value), text)
        for place, value, text in entries
    ]


def header_is_refused(path, place, value, text):
    """Check that a file is refused with a text once its header has a value at a place.

    Where " ... " stands in the text, the error may say more.
    """

    def change(said):
        *outer, last = place
        for name in outer:
            said = said[name]
        said[last] = value

    rewritten(path, header=change)
    told = ".*".join(map(re.escape, text.split(" ... ")))
    with pytest.raises(TraceError, match=f"truncated or damaged.*{told}"):
        Trace.load(path)
