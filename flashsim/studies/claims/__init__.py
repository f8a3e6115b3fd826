"""Checks statements from well-known texts on FlashAttention, and says why each is right or wrong.

No verdict is stored: each check computes the correct figure and compares it with the statement.

>>> from flashsim import claims
>>> print(claims.table())  # doctest: +SKIP
>>> claims.judge("268-times").right
False
"""

from __future__ import annotations

from flashsim.errors import own_errors
from flashsim.problem import checks
from flashsim.report import Table
from flashsim.studies.claims import bytes_and_flops, numbers
from flashsim.studies.claims.finding import Claim, Finding

#: Every claim by its name.
CLAIMS: dict[str, Claim] = {
    claim.name: claim for claim in (*bytes_and_flops.CLAIMS, *numbers.CLAIMS)
}


@own_errors
def judge(name: str) -> Finding:
    """Check one claim by recomputing it, and return the finding.

    Raises
    ------
    OptionError
        If no claim has that name; the message lists all names.
    """
    return CLAIMS[checks.one_of("claim", name, CLAIMS)].check()


@own_errors
def table(*names: str) -> Table:
    """Return a table that shows, for each claim, our verdict, the statement, our result and why.

    If no names are passed, the table contains all claims.

    Raises
    ------
    OptionError
        If a name is unknown.
    """
    result = Table("Claims, recomputed", ("claim", "verdict", "said", "found", "why"))
    for name in names or CLAIMS:
        finding = judge(name)
        verdict = "right" if finding.right else "wrong"
        result.add(name, verdict, CLAIMS[name].said, finding.found, finding.why)
    return result


@own_errors
def overview(full: Table) -> Table:
    """Return the table of claims without its last column, the long reasons."""
    return Table(
        full.title,
        full.columns[:-1],
        [row[:-1] for row in full.rows],
        note="`flashsim study claims NAME` prints the reason; docs/reference/texts.md has all",
    )


__all__ = ["CLAIMS", "Claim", "Finding", "judge", "overview", "table"]
