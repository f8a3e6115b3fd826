"""The precision laboratory: the error that each rounding causes in out and in the gradients.

>>> from flashsim import precision
>>> found = precision.laboratory((256,), kinds=("normal",), points=("lse", "m"))
>>> found.of("lse").errors["dq"] > 1e3 * found.of("m").errors["dq"]
True
"""

from flashsim.studies.precision.input_kinds import KINDS, draw
from flashsim.studies.precision.laboratory import Laboratory, LoweredPoint, laboratory, presets

__all__ = ["KINDS", "Laboratory", "LoweredPoint", "draw", "laboratory", "presets"]
