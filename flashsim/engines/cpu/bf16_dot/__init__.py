"""Products of bfloat16 without conversion: dot products of pairs, summed in float32."""
