"""The simulated algorithms, one page each, reading like their papers."""

from flashsim.algorithms import flash1, flash2, standard
from flashsim.algorithms.memory import Machine

FORWARD = {
    "standard": standard.forward,
    "flash1": flash1.forward,
    "flash2": flash2.forward,
    "flash2-fused": flash2.forward,
}
BACKWARD = {
    "standard": standard.backward,
    "flash1": flash1.backward,
    "flash2": flash2.backward,
    "flash2-fused": flash2.backward_fused,
}

__all__ = ["BACKWARD", "FORWARD", "Machine"]
