"""backends/jax."""
