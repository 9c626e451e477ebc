"""kernels/grouped_matmul."""
