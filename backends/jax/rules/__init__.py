"""What JAX's tools ask of the primitives in `backends/jax/step.py`. Importing a module registers its rules with JAX."""
