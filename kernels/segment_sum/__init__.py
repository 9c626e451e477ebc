"""Sums of rows by group, `x[n] -> out[g(n)]`: the Triton kernel. Torch's and JAX's own sums are in their backends.

The contract: `x` is any tensor read as rows and columns, `out` gets one row per group, and both have one dtype. Groups
without rows are zero, and dropped rows are not read. Rows are added in their order, without atomics, so equal calls
give equal bits. Sums of float16 and bfloat16 are formed in float32.
"""
