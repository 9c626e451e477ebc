"""Sums of rows by group, `x[n] -> out[g(n)]`: the Triton kernel. Torch's and JAX's own sums are in their backends.

The contract: `x` is any tensor read as rows and columns, each row in its place or through a table, `out` gets one row
per group, and both have one dtype. With a second tensor, `y`, products of its rows with those of `x` are summed. Groups
without rows are zero, and dropped rows are not read: neither are rows whose place in a table is outside of the tensor.
Rows are added in one order, without atomics, so equal calls give equal bits. Sums of float16 and bfloat16 are formed in
float32.
"""

# Rows of a window, in which long groups are summed; see `triton_sum`.
WINDOW = 1024
