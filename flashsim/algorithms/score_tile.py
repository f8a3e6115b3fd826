"""Code that algorithms share: scores of a tile, and kernels before or after the main loop."""

import numpy as np

from flashsim.algorithms import functions
from flashsim.algorithms.hbm import Hbm, Tensor
from flashsim.algorithms.machine import Machine
from flashsim.algorithms.sram import Sram
from flashsim.problem.masks import masked_score
from flashsim.schedule.schedule import Visit


def unseen(m: np.ndarray) -> np.ndarray:
    """Return booleans from the rows' maxima (or LSEs): True for each row that saw no key."""
    return m <= masked_score(m.dtype)


def finite(m: np.ndarray) -> np.ndarray:
    """Return the row maxima (or LSEs), with 0 in place of -inf for rows that saw no key.

    Scores minus the result are never inf - inf, which would be NaN. Even without subtraction, the
    exponential of a masked score is 0.
    """
    return np.where(unseen(m), 0, m)


def sink_probability(sink: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Return exp(sink - lse), the share of a row's softmax that goes to its head's sink.

    A sink of -inf gets 0, also in a row without keys, whose LSE is -inf too.
    """
    return np.exp(sink - np.where(np.isneginf(sink), 0, lse))


def log_sum_exp(m: np.ndarray, l: np.ndarray) -> np.ndarray:
    """Return the LSE of rows with maximum m and sum l, which is -inf for rows that saw no key."""
    return np.where(unseen(m), -np.inf, m + np.log(np.where(l == 0, 1, l)))


def score_tile(
    sram: Sram,
    Q_i: np.ndarray,
    K_j: np.ndarray,
    visit: Visit,
    *,
    own: functions.Values = functions.NOTHING,
    member: int | None = None,
    gated: bool = False,
) -> tuple[np.ndarray, functions.Chain]:
    """Compute S_ij = score_mod(softcap(scale Q_i K_j^T) + bias), with masked scores at -inf.

    `own` holds the row tile's captured elements, which a Q-outer loop has loaded. The function
    returns S_ij, (.., rows, cols), and the data for the gradient of scale Q_i K_j^T. If `gated` is
    true and there is a softcap c, the data's field `cap` is 1 - tanh(scale q.k / c)^2.
    """
    p = sram.problem
    shape = Q_i.shape[-2], K_j.shape[-2]
    S_ij, gate = sram.alloc("S", shape), None
    sram.multiply(Q_i, K_j.mT, out=S_ij)
    S_ij *= p.scale
    if p.softcap:
        np.tanh(S_ij / p.softcap, out=S_ij)
        if gated:
            gate = sram.alloc("gate", shape)
            gate[:] = 1 - S_ij * S_ij
        S_ij *= p.softcap
    if p.bias is not None:
        S_ij += sram.load(sram.hbm.bias, visit.rows, visit.cols, member=member)
    chain = functions.apply_score(sram, visit, S_ij, own, member)._replace(cap=gate)
    if (keep := visit.keep) is not None:
        S_ij[..., ~keep] = -np.inf
    functions.apply_mask(sram, visit, S_ij, own, member)
    return sram.rounded("S", S_ij), chain


def score_gradient(
    sram: Sram,
    P_ij: np.ndarray,
    dO_i: np.ndarray,
    V_j: np.ndarray,
    delta_i: np.ndarray | None,
    chain: functions.Chain,
    dL_i: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute dS_ij = P_ij (dP_ij - delta_i) with dP_ij = dO_i V_j^T; dS overwrites the dP tile.

    If `delta_i` is None, the function computes delta = rowsum(P o dP), minus the LSE's gradient
    `dL_i` if there is one. This delta is right only if the tile has all keys that the rows see. The
    first result is the gradient of the scaled product before the softcap, for dQ and dK. The second
    result is the bias's gradient, taken after the softcap and before the score function.
    """
    dP_ij = sram.alloc("dP", P_ij.shape[-2:])
    np.matmul(dO_i, V_j.mT, out=dP_ij)
    if delta_i is None:
        delta_i = sram.alloc("delta", P_ij.shape[-2:-1])
        np.sum(P_ij * dP_ij, axis=-1, out=delta_i)
        if dL_i is not None:
            delta_i -= dL_i
    dS_ij = np.multiply(P_ij, dP_ij - delta_i[..., None], out=dP_ij)
    functions.score_derivative(sram, chain, dS_ij)
    if chain.cap is None:
        return dS_ij, dS_ij
    dbias_ij = dS_ij.copy()
    dS_ij *= chain.cap
    return dS_ij, dbias_ij


def lse_gradient(sram: Sram, rows: slice, *, member: int | None = None) -> np.ndarray | None:
    """Load and return the LSE's gradient for a range of rows; return None without a gradient."""
    return sram.load(sram.hbm.dL, rows, member=member) if sram.problem.dlse else None


def fill(machine: Machine, name: str, values: dict[str, float]) -> None:
    """Run a kernel that fills tensors in HBM with constants; `values` is ``{tensor: value}``."""
    with machine.stage(name) as sram:
        for _, rows in sram.steps():
            for tensor, value in values.items():
                sram.store(machine.hbm.tensors[tensor], rows, value)


def convert(machine: Machine, accumulator: str, result: str) -> None:
    """Run the kernel that rounds an accumulator in HBM to the input's type, if the types differ."""
    name = "convert_dbias" if result == "dBias" else "convert"
    if not machine.has(name):
        return
    tensors = machine.hbm.tensors
    with machine.stage(name) as sram:
        for i, rows in sram.steps():
            for strip in machine.strips(sram, i) if name == "convert_dbias" else (rows,):
                with sram.strip():
                    sram.store(tensors[result], strip, sram.load(tensors[accumulator], strip))


def clear_dbias(machine: Machine) -> None:
    """Clear the accumulator of the bias's gradient, if there is a bias."""
    if machine.has("clear_dbias"):
        fill(machine, "clear_dbias", {accumulator(machine.hbm, "dBias").name: 0.0})


def reduce_dbias(sram: Sram, rows: slice, tile: np.ndarray, cols: slice, member=None) -> None:
    """Add a tile to the bias's gradient in HBM, if there is a bias."""
    if sram.problem.bias is not None:
        sram.reduce(accumulator(sram.hbm, "dBias"), rows, tile, cols, member=member)


def accumulator(hbm: Hbm, result: str) -> Tensor:
    """Return the tensor in which `result` is accumulated: `result` itself, or "..._acc"."""
    return hbm.tensors.get(f"{result}_acc", hbm.tensors.get(result))  # type: ignore[return-value]
