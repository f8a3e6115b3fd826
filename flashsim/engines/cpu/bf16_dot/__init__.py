"""Matrix products of bfloat16 by the CPU's own instructions, without conversion to float32."""
