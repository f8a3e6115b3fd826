"""Walkthroughs with values: numbers small enough to follow by hand, and reasons for each step.

>>> from flashsim import walkthrough
>>> print(walkthrough.softmax([70, 80, 90]))  # doctest: +SKIP
"""

from flashsim.studies.walkthrough.costs import corrections, delta, reread
from flashsim.studies.walkthrough.query_row import tiles
from flashsim.studies.walkthrough.softmaxes import softmax

#: What there is: name -> what it shows.
NAMES = {
    "softmax": "your logits through naive, stable and online softmax, in float32 as on a GPU",
    "tiles": "m, alpha, l and O of a row, tile by tile",
    "delta": "rowsum(P dP) = rowsum(O dO), in numbers",
    "corrections": "dividing once a row, not once a tile",
    "reread": "how long reading P once takes, by device",
}

__all__ = ["NAMES", "corrections", "delta", "reread", "softmax", "tiles"]
