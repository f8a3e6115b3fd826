"""Counts the bank conflicts and the memory sectors of one warp's request to memory.

Shared memory has 32 banks of 4 bytes: word w is in bank w % 32. Per cycle, shared memory serves one
*wavefront*: at most one word from each bank. If lanes request different words of the same bank,
each of these words needs its own wavefront. A word that several lanes request is sent to all of
them in one wavefront. Global memory is read in sectors of 32 bytes.

>>> from flashsim import banks
>>> banks.access("column", "row-major").wavefronts
32
>>> banks.access("column", "padded").wavefronts
1
"""

from flashsim.studies.banks.warp import LAYOUTS, PATTERNS, Access, access, table

__all__ = ["LAYOUTS", "PATTERNS", "Access", "access", "table"]
