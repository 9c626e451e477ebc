"""Dot products of queries with the rows of a pool that an index names, and their gradients.

One module per framework: torch on a CPU, Triton, and JAX. All of them keep this contract; x(b, q, k) is the index.

    scores            s[b, q, k] = query[b, q] . pool[b, x(b, q, k)]
    query gradient    dquery[b, q] = sum over k of g[b, q, k] pool[b, x(b, q, k)]
    pool gradient     dpool[b, m] = sum over all (q, k) with x(b, q, k) = m of g[b, q, k] query[b, q]

What the arguments are:

- `query` is `(B, Q, D)` and `pool` is `(B, M, D)`, of one dtype, in any strides. `size` stands for M where no pool is
  passed. `g`, the gradient of the scores, is `(B, Q, K)`.
- `keys` is an `IndexArray` of shape `(B, Q, K)` with values in `[0, M]`. The value M drops an entry: its score is 0,
  and it sends no gradient. The same row may be named several times; its gradients add up.

Results have the dtype of the operands: scores `(B, Q, K)`, gradients `(B, Q, D)` and `(B, M, D)`. Sums of float16 and
bfloat16 are formed in float32. Rows of the pool that no key names never matter, even where they are NaN or infinite.
Values outside of `[0, M]` are undefined, unless the `IndexArray` says how to bring them into range or to mark them.
Nothing is conjugated: a gradient is the transpose of the scores.
"""
