"""Compare standard attention, FlashAttention-1 and FlashAttention-2 on a real model's tensors."""

import flashsim

q, k, v, expected = flashsim.load_sample("layer0")  # 12 heads, 512 tokens, head_dim 32, float16

comparison = flashsim.compare(q, k, v, device="A100")
print(comparison)

# Standard attention stores and loads two n x n matrices, S and P. FlashAttention-1 loads and stores
# O for every key tile. FlashAttention-2 keeps O on chip until O is complete.
for name, result in comparison.results.items():
    difference = abs(result.out - expected).max()
    print(
        f"{name:<9} moved {result.trace.bytes():>12,} B; differs from the model by {difference:.1e}"
    )
