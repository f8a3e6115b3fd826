"""Statements from well-known write-ups on FlashAttention, recomputed: right or wrong, and why.

Verdicts are not stored: each check computes the truth and compares.

>>> from flashsim import claims
>>> print(claims.table())  # doctest: +SKIP
>>> claims.judge("268-times").right
False
"""

from __future__ import annotations

from flashsim.errors import OptionError, choices, own_errors, shown
from flashsim.report import Table
from flashsim.studies.claims import bytes_and_flops, numbers
from flashsim.studies.claims.finding import Claim, Finding

#: Every claim by its name.
CLAIMS: dict[str, Claim] = {
    claim.name: claim for claim in (*bytes_and_flops.CLAIMS, *numbers.CLAIMS)
}


@own_errors
def judge(name: str) -> Finding:
    """Recompute one claim.

    Raises
    ------
    OptionError
        If there is no claim of that name; the message lists them.
    """
    if not isinstance(name, str) or name not in CLAIMS:
        raise OptionError(f"no claim {shown(name)}; {choices(name, CLAIMS)}")
    return CLAIMS[name].check()


@own_errors
def table(*names: str) -> Table:
    """A table of the named claims, or all: the statement, our result, the verdict and the reason.

    Raises
    ------
    OptionError
        If a name is unknown.
    """
    result = Table("Claims, recomputed", ("claim", "verdict", "said", "found", "why"))
    for name in names or CLAIMS:
        finding = judge(name)
        verdict = "right" if finding.right else "wrong"
        result.rows.append((name, verdict, CLAIMS[name].said, finding.found, finding.why))
    return result


@own_errors
def overview(full: Table) -> Table:
    """The result of `table` without its column of reasons, which is long."""
    return Table(
        full.title,
        full.columns[:-1],
        [row[:-1] for row in full.rows],
        note="why: `flashsim study claims NAME`, docs/reference/texts.md",
    )


__all__ = ["CLAIMS", "Claim", "Finding", "judge", "overview", "table"]
