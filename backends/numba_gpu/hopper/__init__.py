"""Python kernels that use Hopper's own instructions (`wgmma`, TMA)."""
