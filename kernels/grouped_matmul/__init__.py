"""Each row times the matrix of its group, `n i j, g[n] j k -> n i k`, and the gradients, without building `c[g]`.

One module per implementation: torch in pieces on a CPU, torch's own `grouped_mm`, Triton, JAX in tiles, Pallas on TPUs
and on GPUs. All of them keep this contract. Row r belongs to group g(r), and s(r) is its place in `a`, its source.

    grouped_matmul(a, c, groups, source, target, targets)    out[r] = a[s(r)] @ c[g(r)]
    grouped_outer(a, b, groups, source_a, source_b)          out[g] = sum of a[s(r)]^T @ b[s'(r)] over the rows r of g
    grouped_gradients(gout, a, c, groups, source)            da[r] = gout[r] @ c[g(r)]^T
                                                             dc[g] = sum of a[s(r)]^T @ gout[r] over the rows r of g

What the arguments are:

- `a` is `(Na, I, J)`, `b` is `(Nb, I, K)`, `c` is `(G, J, K)`, one matrix per group, and `gout` is `(N, I, K)`. All
  have one dtype and any strides.
- `groups` says which of the N rows belong to which group (`kernels/grouping`). A dropped row belongs to no group.
- `source` is `(N,)` with values in `[0, Na)`. Without it, s(r) is r. `source_a` and `source_b` are the sources in `a`
  and in `b`.
- `turned`, which only the modules for JAX take, says that `c` and its gradient are `(G, K, J)`.
- `target` is `(N,)` with values in `[0, targets]`: row r is added to `out[target[r]]`, and the value `targets` drops
  it. Without it, row r is `out[r]`. `target` and `targets` go together.

Results have the operands' dtype: `(N, I, K)`, or `(targets, I, K)` with a target; `(G, J, K)`; and for the gradients
`(N, I, J)` and `(G, J, K)`. `da` has one entry per row, also where rows share a source: the caller adds those up.
Results are zero for dropped rows, for empty groups and for targets without rows. Sums of float16 and bfloat16 are
formed in float32. A dropped row never matters, even if it is NaN. Values out of range are undefined: the caller checks
them. Nothing is conjugated: the gradients are transposes.
"""
