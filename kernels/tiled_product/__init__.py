"""kernels/tiled_product."""
