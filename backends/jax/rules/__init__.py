"""Rules that JAX's tools ask of the primitives in `backends/jax/step.py`. Importing a module here registers its rules."""
