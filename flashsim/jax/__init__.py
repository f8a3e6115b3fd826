"""Attention for models in JAX, and traces of Pallas kernels.

The package needs JAX (``pip install 'flashsim-attention[jax]'``).
"""

from __future__ import annotations

from flashsim.errors import BackendUnavailable

try:
    import jax
except ImportError as error:
    raise BackendUnavailable(
        f"flashsim.jax needs JAX, which cannot be imported ({error}): "
        "pip install 'flashsim-attention[jax]'"
    ) from None
# The version of setup.cfg, which a test compares. The site's build replaces JAX: it has no tuple.
if isinstance(v := getattr(jax, "__version_info__", ()), tuple) and v < (0, 10, 2):
    raise BackendUnavailable(
        f"flashsim.jax needs JAX 0.10.2 or newer, but found {jax.__version__}: "
        "pip install --upgrade 'flashsim-attention[jax]'"
    )

from flashsim.jax.attention_override import dot_product_attention
from flashsim.jax.functional import attention
from flashsim.jax.pallas import trace_kernel

__all__ = ["attention", "dot_product_attention", "trace_kernel"]
