"""Walkthroughs: small examples with all intermediate numbers, and the reason for each step.

>>> from flashsim import walkthrough
>>> print(walkthrough.softmax([70, 80, 90]))  # doctest: +SKIP
"""

from flashsim.studies.walkthrough.costs import corrections, delta, reread
from flashsim.studies.walkthrough.query_row import tiles
from flashsim.studies.walkthrough.softmaxes import softmax

#: The walkthroughs: name -> the content.
NAMES = {
    "softmax": "your logits through naive, stable and online softmax, in float32 as on a GPU",
    "tiles": "m, alpha, l and O of a row, tile by tile",
    "delta": "rowsum(P dP) = rowsum(O dO), in numbers",
    "corrections": "how many divisions O needs, once per row or once per tile",
    "reread": "how long reading P from HBM takes, by device",
}

__all__ = ["NAMES", "corrections", "delta", "reread", "softmax", "tiles"]
