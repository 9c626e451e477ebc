"""kernels/gathered_dot."""
