"""softmax(X) V without softmax(X) in memory: the first step of many courses on FlashAttention.

X (batch, d1, d2) holds scores, V (batch, d2, d3) values; softmax runs along d2.

>>> import numpy as np
>>> from flashsim import softmax_matmul
>>> x, v = np.random.default_rng(0).standard_normal((2, 4, 64, 64), dtype=np.float32)
>>> result = softmax_matmul.run(x, v, block=32)
>>> result.bytes("load", "X") == x.nbytes
True
"""

from flashsim.studies.softmax_matmul.operation import SoftmaxProduct, count, plain, run

__all__ = ["SoftmaxProduct", "count", "plain", "run"]
