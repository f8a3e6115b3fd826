"""Small problems for attention in torch and in JAX: sizes of tensors, and options."""

CUTS = {"cu_seqlens_q": (0, 4, 7), "cu_seqlens_k": (0, 5, 9), "causal": True}
CASES = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True}),
    "grouped": ({"heads": 4, "kv_heads": 2}, {"causal": True}),
    "softcap": ({}, {"softcap": 2.0}),
    "window": ({}, {"window": (3, 2), "scale": 0.7}),
    "packed": ({"batch": 1}, CUTS),
    "bias": ({"bias": (1, 2)}, {"causal": True}),
    "bias a batch entry": ({"bias": (2, 1)}, {}),
}
