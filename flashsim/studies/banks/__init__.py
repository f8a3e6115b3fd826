"""Counts bank conflicts in shared memory, and sectors of global memory, for a warp's request.

Shared memory has 32 banks of 4 bytes: word w is in bank w % 32. Per cycle, shared memory serves one
*wavefront*: at most one word from each bank. Requests for different words of the same bank need one
wavefront for each word. If several lanes request the same word, it is sent to all of them at once.
Global memory is read in sectors of 32 bytes.

>>> from flashsim import banks
>>> banks.access("column", "row-major").wavefronts
32
>>> banks.access("column", "padded").wavefronts
1
"""

from flashsim.studies.banks.warp import LAYOUTS, PATTERNS, Access, access, table

__all__ = ["LAYOUTS", "PATTERNS", "Access", "access", "table"]
