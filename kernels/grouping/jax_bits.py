"""bfloat16 arrays as integers: on a CPU, XLA converts a whole bfloat16 array to float32 to access a part of it."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

__all__ = ["bits", "of_bits"]


def bits(x: jax.Array) -> jax.Array:
    """Return a bfloat16 array as integers; other arrays are returned unchanged."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def of_bits(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Undo `bits` for an array that had this dtype."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if dtype == jnp.bfloat16 else x
