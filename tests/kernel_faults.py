"""Classic bugs of GPU kernels, each one a replaced fragment of the Hopper backward's CUDA C++.

``python -m pytest --kernel-fault NAME tests/test_hopper.py`` seeds one, and the tests should fail.
Only bugs that end are here: a wait that never comes true would hang the GPU instead.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

BACKWARD, WIDE, DQ = "hopper_backward.cu", "hopper_backward_wide.cu", "hopper_dq.cu"
SHARED = "hopper_keys_outside.cuh"


@dataclass(frozen=True)
class KernelFault:
    """`old` becomes `new` in kernels/`file`; the tests of test_hopper.py that `caught_by` picks
    (pytest's -k) must notice.
    """

    bug: str
    file: str
    old: str
    new: str
    caught_by: str


FAULTS = {
    # -- order: who may read what, and when -------------------------------------------------------
    "tiles-not-awaited": KernelFault(
        "products start before the copy engine has brought Q and dO",
        *(BACKWARD, "wait(&s.full[stage], ring.parity);", "", "test_features and ragged and 128"),
    ),
    "keys-overwritten": KernelFault(
        "the next item's K and V are copied over those that are still read",
        *(SHARED, "wait(&s.kv_empty, kv_parity ^ 1);", "", "test_features and many and 128"),
    ),
    "ds-not-awaited": KernelFault(
        "dQ starts before the other warpgroup has written its dS",
        *(BACKWARD, "named_sync(DS_READY, 128 * WARPGROUPS);", "", "test_features and ragged"),
    ),
    "wide-scores-not-awaited": KernelFault(
        "dV starts before the other warpgroup has written its P",
        *(WIDE, "named_sync(SCORES_READY, 128 * WARPGROUPS);", ""),
        "test_features and ragged and 256",
    ),
    "out-of-turn": KernelFault(
        "dQ is added in whatever order blocks come",
        *(BACKWARD, "wait_turn(turn, a.ranks[a.ptr[it.outer] + step.v]);", ""),
        "two_hundred and 1024 and 128",
    ),
    # -- masks and bounds -------------------------------------------------------------------------
    "mask-skipped": KernelFault(
        "masked tiles are treated as full ones",
        *(SHARED, "if (!masked) return;", "return;", "test_features and causal and 64"),
    ),
    "mask-off-by-one": KernelFault(
        "the diagonal itself is masked",
        *(SHARED, "(c < first ||", "(c <= first ||", "test_features and causal and 64"),
    ),
    "dq-mask-off-by-one": KernelFault(
        "the diagonal itself is masked in dQ's own pass",
        *(DQ, "(c > last ||", "(c >= last ||", "test_features and causal and 64"),
    ),
    "sequences-start-at-0": KernelFault(
        "the rows of every packed sequence are read from the first one's tiles",
        *(SHARED, "const int query = it.base + it", "const int query = it"),
        "test_features and varlen",
    ),
    # -- arithmetic -------------------------------------------------------------------------------
    "delta-left-out": KernelFault(
        "dS = P dP",
        *(SHARED, "s.delta[ring.stage][x] = -delta[i];", "s.delta[ring.stage][x] = 0.0f;"),
        "test_features and ragged and 128",
    ),
    "lse-in-base-e": KernelFault(
        "the log-sum-exp is not taken to base 2",
        *(SHARED, ": -LOG2E;", ": -1.0f;", "test_features and (softcap or ragged) and 256"),
    ),
    "dk-not-scaled": KernelFault(
        "dK misses the scale",
        *(BACKWARD, "row, dK, r, a.scale, exists)", "row, dK, r, 1.0f, exists)"),
        "test_features and ragged and 128",
    ),
    "wrong-query-head": KernelFault(
        "every query head of a group is taken for the first",
        *(SHARED, "kv_head * a.group + step.member;", "kv_head * a.group;"),
        "test_features and causal and 128",
    ),
    "half-of-dq": KernelFault(
        "the second half of the keys is left out of dQ",
        *(DQ, "dQ[c + e] += s.partial[e][threadIdx.x % 128];", ";"),
        "test_features and ragged and 128",
    ),
    "dq-columns-swapped": KernelFault(
        "both warpgroups add their columns of dQ to the first ones",
        *(BACKWARD, "SPLIT_COLUMNS ? 64 * g : 0;", "0;", "test_features and ragged and 128"),
    ),
    "staging-not-swizzled": KernelFault(
        "dQ is staged without the copy engine's swizzle",
        *(BACKWARD, "(dq_piece ^ dq_row) * 16", "dq_piece * 16", "test_features and ragged and 64"),
    ),
    "narrow-columns-shared": KernelFault(
        "both warpgroups multiply the same half of the middle chunk",
        *(WIDE, "return 64 + 32 * g;", "return 64;", "test_head_dims and bfloat16"),
    ),
    # -- counts -----------------------------------------------------------------------------------
    "ragged-rows-counted": KernelFault(
        "rows past the end count as loaded",
        *(SHARED, "const int rows = min(BLOCK_Q, it.end - query);", "const int rows = BLOCK_Q;"),
        "counts and ragged and 96 and ascending",
    ),
}


class KernelFaultError(Exception):
    """A fault that does not exist, or that no longer fits the source."""


def install(name: str) -> None:
    """Seed one fault into what the CUDA C++ backends compile.

    Raises
    ------
    KernelFaultError
        If there is no such fault or it no longer fits.
    """
    from flashsim.backends import compiler

    if name not in FAULTS:
        close = difflib.get_close_matches(name, FAULTS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise KernelFaultError(f"no kernel fault {name!r}{hint}; there are: {', '.join(FAULTS)}")
    sound = compiler.source

    def faulty(file: str) -> str:
        text = sound(file)
        return seeded(FAULTS[name], text) if file == FAULTS[name].file else text

    faulty(FAULTS[name].file)  # fails here rather than at the first launch
    sound.cache_clear()
    compiler.source = faulty


def seeded(fault: KernelFault, text: str) -> str:
    """A kernel's source with the bug in it."""
    if text.count(fault.old) != 1:
        raise KernelFaultError(
            f"{fault.file} holds the fragment {fault.old!r} {text.count(fault.old)} times, not "
            "once; bring tests/kernel_faults.py up to date"
        )
    return text.replace(fault.old, fault.new)
