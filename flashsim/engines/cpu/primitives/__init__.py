"""What compiled walks share: atomics, packing, references."""
