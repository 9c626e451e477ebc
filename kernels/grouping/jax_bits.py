"""bfloat16 arrays as integers: on a CPU XLA makes a whole one float32 to take a part of it, or to put one in."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

__all__ = ["bits", "of_bits"]


def bits(x: jax.Array) -> jax.Array:
    """Return a bfloat16 array as integers, any other as it is."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def of_bits(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the array that had this dtype: the inverse of `bits`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if dtype == jnp.bfloat16 else x
