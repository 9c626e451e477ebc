"""bfloat16 arrays as integers: on a CPU, XLA converts a whole bfloat16 array to float32 to access a part of it."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def bits(x: jax.Array) -> jax.Array:
    """Return a bfloat16 array as integers; other arrays are returned unchanged."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def of_bits(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Undo `bits` for an array that had this dtype."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if dtype == jnp.bfloat16 else x


def gather_rows(operand: jax.Array, rows: jax.Array, zeros: bool = False) -> jax.Array:
    """Return `operand[rows]`; beyond the end the last row, or zeros if asked."""
    # lax.gather instead of `operand[rows]`: jnp's indexing adds two passes over the row numbers, for negative ones.
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, operand.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    dtype = operand.dtype
    if dtype == jnp.bfloat16:  # bound to the rows: else XLA converts the whole operand to bits before the loop
        operand, rows = lax.optimization_barrier((operand, rows))
    gathered = lax.gather(
        bits(operand), rows[:, None], numbers, (1, *operand.shape[1:]), mode=lax.GatherScatterMode.CLIP
    )
    if zeros:
        present = lax.broadcast_in_dim(rows < operand.shape[0], gathered.shape, (0,))
        gathered = lax.select(present, gathered, lax.full_like(gathered, 0))
    return of_bits(gathered, dtype)
