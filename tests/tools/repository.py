"""Files of the repository: pages, kept measurements, and scripts that are in no package."""

import csv
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def page(name):
    """Return the text of a page in docs/."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def recorded(table):
    """Return the rows of a CSV file, as dicts; a name is that of a file in docs/data/."""
    with (ROOT / "docs/data" / table).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def loaded(path):
    """Return a Python file as a new module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name):
    """Return a file of benchmarks/ as a new module, which finds the others."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return loaded(BENCHMARKS / f"{name}.py")
