"""Decode one query on a long cache: split keys, packed heads, pages and a shared prefix."""

import numpy as np

import flashsim
from flashsim import DecodeOptions, Problem
from flashsim.schedule.split_kv import fill

model = {"head_dim": 128, "heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
problem = Problem(1, 32_768, **model)
how = {"algorithm": "flash-decode", "device": "H200"}

# Eight KV heads give only eight thread blocks. If the keys are split, nearly all SMs have a block.
filled = fill(problem, flashsim.Device.get("H200"))
print(f"{filled.whole} row tiles; {filled.split}: {filled.blocks} thread blocks for 132 SMs")
for splits in (1, 4, 16):
    took = flashsim.predict.predict(problem, algorithm="flash-decode", splits=splits).seconds
    print(f"  {splits:>2} splits: {took * 1e6:6.1f} µs predicted")

# Count the bytes of partial results, unpacked heads, small pages and a shared prefix.
auto = flashsim.count(problem, **how)
parts = auto.bytes(None, "O_part") + auto.bytes(None, "L_part")
print(f"partial results: {parts:,} B of {auto.bytes():,} B")
apart = flashsim.count(problem, pack_gqa=False, **how)
print(f"heads not packed: K is loaded {apart.bytes('load', 'K') // auto.bytes('load', 'K')} times")
paged = flashsim.count(Problem(1, 32_768, page_size=16, **model), **how)
print(f"pages of 16: {paged.bytes('load', 'table'):,} B of the block table")
batch = Problem(1, 32_768, batch=8, **model)
once = flashsim.count(batch, shared_prefix=16_384, **how)
print(f"8 caches, half of each shared: {once.bytes() / flashsim.count(batch, **how).bytes():.2f} x")

# Run two sequences of different lengths. Then merge two parts of the keys by hand.
rng = np.random.default_rng(0)
q = rng.standard_normal((2, 4, 1, 16), np.float32)
k, v = rng.standard_normal((2, 2, 2, 96, 16), np.float32)
# One object, for `count` and `compare` too.
decode = DecodeOptions(cache_seqlens=[96, 40], splits=3)
whole = flashsim.run(q, k, v, algorithm="flash-decode", decode=decode, trace=True)
first, rest = (
    flashsim.run(q[:1], k[:1, :, part], v[:1, :, part]) for part in (slice(0, 50), slice(50, 96))
)
out, lse = flashsim.merge(first.out, first.lse, rest.out, rest.lse)
print(f"merged by hand, largest difference {np.abs(out - whole.out[:1]).max():.1e}")
print(whole.trace)
