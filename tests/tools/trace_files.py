"""Rewrites a trace file, with sound checksums and a sound directory."""

import json

import numpy as np


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
