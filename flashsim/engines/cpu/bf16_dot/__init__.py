"""bfloat16 as it lies in memory: products of pairs of 16-bit numbers, summed in float32."""
