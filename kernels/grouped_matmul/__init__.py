"""Each row meets the matrix of its group, `n i j, g[n] j k -> n i k`, and the gradients, without building `c[g]`.

One module a way to do it: torch in pieces, torch's own `grouped_mm`, Triton, JAX in tiles, Pallas on TPUs and GPUs.
"""
