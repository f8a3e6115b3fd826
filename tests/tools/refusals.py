"""Tables of calls that flashsim refuses, and the errors that they must raise.

A table is text. Each entry is ``call -> ErrorClass: text``; an indented line continues the line
before. Where " ... " stands in the text, the error may say more, as it may at both ends unless
the text begins with "^" or ends with "$".
"""

import re
import sys

import numpy as np
import pytest

import flashsim
from flashsim import errors

PUBLIC = {name: getattr(flashsim, name) for name in flashsim.__all__}


def refusals(table):
    """Return the entries of a table as pairs (call, error)."""
    entries = re.split(r"\n(?=\S)", table.strip())
    return [tuple(" ".join(entry.split()).split(" -> ")) for entry in entries]


def refused(call, said, scope):
    """Evaluate a call of a table, and check the class and the text of its error."""
    kind, _, text = said.partition(":")
    with pytest.raises(getattr(errors, kind)) as caught:
        eval(call, {**PUBLIC, "flashsim": flashsim, "np": np, **scope})
    assert type(caught.value).__name__ == kind
    told, parts = f"^{caught.value}$", map(re.escape, text.strip().split(" ... "))
    assert re.search(".*".join(parts), told, re.DOTALL), told
    return caught.value


def refuses(table):
    """Return a test of every entry of a table, whose calls use names of the caller's module."""
    scope = sys._getframe(1).f_globals

    @pytest.mark.parametrize(("call", "said"), refusals(table))
    def test(call, said):
        refused(call, said, scope)

    return test
