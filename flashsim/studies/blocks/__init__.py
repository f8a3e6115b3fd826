"""Compares tile sizes: computes the iterations, bytes and predicted time of each GPU kernel.

>>> from flashsim import Problem, blocks
>>> print(blocks.sizes(Problem(4096, head_dim=128, heads=16, dtype="bfloat16")))  # doctest: +SKIP
"""

from flashsim.studies.blocks.stages import SIDES, BlockSizes, TiledStage, mixed, sizes

__all__ = ["SIDES", "BlockSizes", "TiledStage", "mixed", "sizes"]
