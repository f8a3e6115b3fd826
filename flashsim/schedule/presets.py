"""A table of the tile sizes that published FlashAttention kernels use."""

#: Tiles of published kernels: {kernel: {largest head_dim: (tile, tile with a causal mask)}}, where
#: a tile is (block_q, block_k). Source: Dao-AILab/flash-attention at commit 0251105a, for 16-bit
#: inputs with head_dim_v = head_dim. The FA2 tiles are those for an A100 without dropout, from
#: `csrc/flash_attn/src/flash_{fwd,bwd}_launch_template.h`. The FA3 tiles are those for an H100
#: without window, softcap or paging, from `tile_size_fwd_sm90` in `hopper/tile_size.h` and from
#: `hopper/flash_bwd_launch_template.h`.
PRESETS: dict[str, dict[int, tuple[tuple[int, int], tuple[int, int]]]] = {
    "fa2-forward": {64: ((128, 128), (128, 128)), 256: ((128, 64), (128, 64))},
    "fa2-backward": {
        64: ((128, 128), (128, 128)),
        128: ((64, 128), (64, 128)),
        256: ((64, 64), (64, 64)),
    },
    "fa3-forward": {
        64: ((192, 192), (192, 128)),
        96: ((192, 144), (192, 144)),
        128: ((128, 176), (128, 128)),
        192: ((128, 112), (128, 112)),
        256: ((128, 80), (128, 80)),
    },
    "fa3-backward": {
        64: ((128, 128), (128, 128)),
        96: ((64, 128), (64, 128)),
        128: ((80, 128), (64, 128)),
        192: ((64, 96), (64, 96)),
        256: ((64, 80), (64, 80)),
    },
}
