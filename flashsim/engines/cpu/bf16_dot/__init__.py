"""Matrix products in the CPU's bfloat16 instructions, without conversion to float32."""
