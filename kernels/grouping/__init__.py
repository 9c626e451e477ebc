"""kernels/grouping."""
