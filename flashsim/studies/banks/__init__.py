"""Memory on the chip: bank conflicts of shared memory, sectors of global memory, a warp at a time.

Shared memory is 32 banks of 4 bytes: word w lies in bank w % 32. What a warp asks for takes one
*wavefront* a cycle; words of one bank that differ take one each, a word that several lanes want is
handed to all of them. Global memory moves in sectors of 32 bytes.

>>> from flashsim import banks
>>> banks.access("column", "row-major").wavefronts
32
>>> banks.access("column", "padded").wavefronts
1
"""

from flashsim.studies.banks.warp import LAYOUTS, PATTERNS, Access, access, table

__all__ = ["LAYOUTS", "PATTERNS", "Access", "access", "table"]
