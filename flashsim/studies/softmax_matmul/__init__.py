"""Computes softmax(X) V without storing softmax(X): a first exercise on FlashAttention.

X of shape (batch, d1, d2) contains scores, and V of shape (batch, d2, d3) values. The softmax is
computed along d2.

>>> import numpy as np
>>> from flashsim import softmax_matmul
>>> x, v = np.random.default_rng(0).standard_normal((2, 4, 64, 64), dtype=np.float32)
>>> result = softmax_matmul.run(x, v, block=32)
>>> result.bytes("load", "X") == x.nbytes
True
"""

from flashsim.studies.softmax_matmul.operation import SoftmaxProduct, count, plain, run

__all__ = ["SoftmaxProduct", "count", "plain", "run"]
