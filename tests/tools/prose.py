"""`make lint`'s check of prose: long sentences, banned phrases, terms that nobody has explained.

    python tests/tools/prose.py [FILE ...]     # default: the files of PAGES, except NOT_YET

Markdown pages, and docstrings of modules, are read sentence by sentence. There are three rules:

- A sentence has at most 35 words, except in the pages of LAB.
- A phrase of BANNED does not occur.
- A guide or a lesson links a term of the glossary at first use, if the glossary has it in bold. A
  page that sets the term itself in bold or italics defines it, and needs no link.

Code, tables, headings and link targets are not read.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY = "docs/guides/glossary.md"
LONGEST = 35

#: What is checked, as patterns of paths.
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/README.md"),
    *("docs/guides/*.md", "docs/lessons/*.md", "docs/reference/*.md", "docs/notebooks/*.md"),
    *("flashsim/*.py", "flashsim/api/*.py", "flashsim/problem/*.py", "flashsim/cli/*.py"),
    *("flashsim/distributed/*.py", "flashsim/exercises/*.py", "viz/**/*.py", "examples/*.py"),
    *("flashsim/schedule/schedule.py", "flashsim/schedule/tiling.py", "flashsim/torch/watch.py"),
)
#: Pages that are not yet rewritten. Take a name out when its page passes; the list is to be empty.
NOT_YET: set[str] = set()
#: Pages that newcomers read: they link terms.
TEACH = ("docs/guides/", "docs/lessons/")

#: Lab notes: their sentences may be long, but use the field's words.
LAB = "docs/notebooks/"
#: What they may say besides: a column's name that their first page defines, and history.
LAB_SAYS = ("FA-CuTe", "the day before")
#: Units before which "a" would stand where "per" is meant.
UNITS = "µs|ms|[KMG]i?B|bytes|cycles|instructions|registers|tokens|GFLOP/s|TFLOP/s"

#: Pattern, and what to write instead.
BANNED = {
    r"\bby turns\b": "interleaved, or alternating",
    r"\bstoreys?\b": "layer",
    r"\bFA-CuTe\b": "FlashAttention's CuTe-DSL kernels, explained at first use",
    r"\bcopy engine\b": "TMA",
    r"\bwhole rounds?\b": "full waves",
    r"\bclumps?\b": "head group",
    r"\bwitness(es)?\b": "independent check",
    r"\b(keys|queries) outside\b": "KV-outer, or Q-outer",
    r"\bin step\b": "co-scheduled",
    r"\b[Ss]ome (\d|two|three|ten|half|hundred|thousand)": "about",
    r"\bmakes? \d+\.\d": "reaches",
    r"\bof the best\b": "say what is divided by what",
    r"\bto be had\b": "available",
    r"\b(FLOPs|bytes?|blocks|tiles|rounding|time) an? \w": "per",
    r"\b(one|once|twice|times|number|scale|block|row) an? "
    r"(head|tile|row|block|SM|visit|element|key|query|tensor|sequence)\b": "per",
    r"\bof (yours|ours)\b": "your, our",
    r"\bone's own\b": "your own",
    r"\bbut for\b": "except",
    rf"\b({UNITS}) an? (?!clock)[a-z]+\b": "per",
    r"\bin the place of\b": "instead of",
    r"\bfor ever\b": "forever",
    r"\bwork items?\b|\bof items\b": "work tile",
    r"\b(inner|outer|short|long|each|a) walks?\b": "loop",
    r"^What [^?]*$": "start with the subject",
    r"\b(the day before|kernels of before)\b": "history belongs in a notebook",
}


def findings(path: Path, terms: dict[str, str]) -> Iterator[str]:
    """Each broken rule of one file, as ``path:line: words``."""
    text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
    passages = [*(_docstrings(text) if path.suffix == ".py" else _paragraphs(text))]
    for line, passage in passages:
        for sentence in sentences(passage):
            words = re.findall(r"\S*\w\S*", sentence)
            if len(words) > LONGEST and not name.startswith(LAB):
                yield f"{name}:{line}: {len(words)} words: {' '.join(words[:9])} ..."
            for pattern, instead in BANNED.items():
                match = re.search(pattern, sentence)
                if match and not (name.startswith(LAB) and match.group() in LAB_SAYS):
                    yield f"{name}:{line}: {match.group()[:40]!r}: write: {instead}"
    if not name.startswith(TEACH) or name == GLOSSARY:
        return
    for term, pattern in terms.items():
        for line, passage in passages:
            plain = re.sub(r"`[^`]*`", "", passage)
            if re.search(pattern, re.sub(r"\]\([^)]*\)", "", plain)):
                if not re.search(rf"\[[^]]*{pattern}[^]]*\]\(|\*[^*]*{pattern}", plain):
                    yield f"{name}:{line}: {term!r} is first used here: link the glossary"
                break


def sentences(passage: str) -> list[str]:
    """Return a passage's sentences, without code and link targets."""
    plain = re.sub(r"`[^`]*`", "x", passage)
    plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", plain)
    plain = re.sub(r"[*_]{1,2}(\S[^*_]*)[*_]{1,2}", r"\1", " ".join(plain.split()))
    return [s for s in re.split(r"(?<=[.!?:;])\s+(?=[A-Z0-9\"'(x])", plain) if s]


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and list items of Markdown, with the lines where they start."""
    start, lines, fenced = 0, [], False
    text = re.sub(r"\A---\n.*?\n---\n", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        begins = re.match(r"\s*([-*]|\d+\.) ", line)
        indented = line.startswith("    ") and not lines
        skipped = fenced or fence or indented or re.match(r"\s*[|#><]|!\[|\(\w+\)=", line)
        if lines and (skipped or begins or not line.strip()):
            yield start, " ".join(lines)
            lines = []
        fenced ^= fence
        if not skipped and line.strip():
            start = start if lines else number
            lines.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line))


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs of docstrings; sections of parameters and examples are left out."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
            for paragraph in re.split(r"\n\n|\n(?=- )", doc):
                if not re.search(r"\n *-{3,}|::$|^ {4}|>>>|\n {4}", paragraph):
                    yield node.body[0].lineno, paragraph


def glossary() -> dict[str, str]:
    """The terms in bold in the glossary's first column, each with its pattern."""
    rows = re.findall(r"^\|([^|]*)\|", (ROOT / GLOSSARY).read_text(encoding="utf-8"), re.M)
    terms = [term for row in rows for term in re.findall(r"\*\*([^*]+)\*\*", row)]
    plain = {term: term[1:].removesuffix("s").replace(" ", r"\s+") for term in terms}
    return {term: rf"\b[{term[0]}{term[0].upper()}]{rest}s?\b" for term, rest in plain.items()}


def main(arguments: list[str]) -> int:
    """Print every finding; 1 if there is one."""
    names = arguments or [path for pattern in PAGES for path in map(str, ROOT.glob(pattern))]
    paths = sorted({Path(name).resolve() for name in names})
    if not arguments:
        paths = [p for p in paths if p.relative_to(ROOT).as_posix() not in NOT_YET]
    found = [one for path in paths for one in findings(path, glossary())]
    print(*found, f"{len(paths)} files, {len(found)} findings", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
