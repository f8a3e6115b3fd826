"""Draw sixty sentences at random, for a fresh reader to mark clear, second reading, or unclear.

    python tests/tools/sample_sentences.py [--seed N]

Ten come from the README, twenty-five from the guides, fifteen from docstrings and ten from error
texts. The same seed gives the same sentences.
"""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

from prose import ROOT, _docstrings, _paragraphs

#: Patterns of paths, and how many sentences to draw from all of them together.
DRAWS = {
    "README": (("README.md",), 10),
    "guides": (("docs/guides/*.md",), 25),
    "docstrings": (("flashsim/**/*.py", "viz/**/*.py", "backends/**/*.py"), 15),
    "error texts": (("flashsim/**/*.py", "viz/**/*.py", "backends/**/*.py"), 10),
}


def texts(kind: str, path: Path) -> Iterator[str]:
    """Yield the passages of one file from which sentences of a kind are drawn."""
    source = path.read_text(encoding="utf-8")
    if kind == "error texts":
        yield from errors(source)
    else:
        for _, passage in (_docstrings if path.suffix == ".py" else _paragraphs)(source):
            yield passage


def errors(source: str) -> Iterator[str]:
    """Yield the texts in `raise Kind("...")`, with {...} in place of values."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.value
            elif isinstance(text, ast.JoinedStr):
                parts = (x.value if isinstance(x, ast.Constant) else "{...}" for x in text.values)
                yield "".join(map(str, parts))


def cut(passage: str) -> list[str]:
    """Return the sentences of a passage with four words or more."""
    plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", " ".join(passage.split()))
    return [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(])", plain) if len(s.split()) > 3]


def main() -> None:
    """Print the numbered sentences, one kind after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    rng, number = random.Random(parser.parse_args().seed), 0
    for kind, (patterns, count) in DRAWS.items():
        paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
        passages = (passage for path in paths for passage in texts(kind, path))
        whole = kind == "error texts"
        every = [s for x in passages for s in ([" ".join(x.split())] if whole else cut(x))]
        every = [s for s in every if len(s.split()) > 3]
        print(f"# {kind}")
        for sentence in rng.sample(sorted(set(every)), count):
            number += 1
            print(f"{number}. {sentence}")


if __name__ == "__main__":
    main()
