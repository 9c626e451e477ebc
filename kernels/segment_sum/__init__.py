"""kernels/segment_sum."""
