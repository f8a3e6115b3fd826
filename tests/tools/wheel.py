"""Build the sdist and from it the wheel, install the wheel in a fresh environment and use it there.

Part of `make test`. An editable install would hide a file that the wheel lacks. So this uses only
the wheel, from a directory without sources, with the packages that its metadata require and no
others; those are linked from the environment that this runs in.
"""

import subprocess
import sys
import tempfile
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

CHECK = """
import importlib.resources, pathlib, sys
import flashsim, flashsim.backends, flashsim.viz, flashsim.algorithms.flash2
root = pathlib.Path(sys.argv[1])
where = pathlib.Path(flashsim.__file__).resolve()
assert sys.prefix in str(where), where
for package, source, pattern in (
    ("flashsim", "flashsim", "data/*.npz"),
    ("flashsim", "flashsim", "data/*.csv"),
    ("flashsim", "flashsim", "py.typed"),
    ("flashsim.backends", "backends", "**/*.cu*"),
    ("flashsim.viz", "viz", "**/*.html"),
    ("flashsim.viz", "viz", "**/*.js"),
    ("flashsim.viz", "viz", "**/*.css"),
    ("flashsim.backends", "backends", "**/*.py"),
    ("flashsim.viz", "viz", "**/*.py"),
    ("flashsim", "flashsim", "**/*.py"),
):
    installed = pathlib.Path(str(importlib.resources.files(package)))
    want = {p.relative_to(root / source) for p in (root / source).glob(pattern)}
    missing = sorted(str(p) for p in want if not (installed / p).exists())
    assert want and not missing, (package, pattern, missing)
result = flashsim.count(flashsim.Problem(1024, head_dim=64), tiling=flashsim.Tiling(128, 64))
print("wheel ok:", where.parent, result.bytes("load"), "B loaded")
"""


def main() -> None:
    """Raise `CalledProcessError` at the first step that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        # `pip install -e .` has already built in isolation, with the requirements of
        # pyproject.toml.
        run(
            sys.executable,
            "-m",
            "build",
            "-q",
            "--no-isolation",
            "--outdir",
            place,
            ROOT,
            cwd=place,
        )
        (wheel,) = place.glob("flashsim_attention-*.whl")
        venv.create(place / "env", with_pip=False)
        python = place / "env" / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
        run(*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", wheel, cwd=place)
        (packages,) = (place / "env" / "lib").glob("python*/site-packages")
        (metadata,) = packages.glob("flashsim_attention-*.dist-info")
        link(Distribution.at(metadata).requires or [], packages)
        run(python, "-c", CHECK, ROOT, cwd=place)
        command = place / "env" / "bin" / "flashsim"
        run(command, "count", "--n-q", "1024", "--json", cwd=place)


def link(requirements: list[str], to: Path) -> None:
    """Link the required packages, and those that they require, into the folder `to`."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        one = waiting.pop()
        if one.name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(one.name)
        package = distribution(one.name)
        assert one.specifier.contains(package.version, prereleases=True), (one, package.version)
        waiting += [Requirement(text) for text in package.requires or []]
        for top in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            if not (to / top).exists():  # two packages may share a namespace
                (to / top).symlink_to(package.locate_file(top))


def run(*command: object, cwd: Path) -> None:
    """Run a command, and raise if it fails."""
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


if __name__ == "__main__":
    main()
