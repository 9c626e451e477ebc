"""The backend of JAX: a step is a primitive with rules for every transformation, lowered to XLA or to Pallas kernels.

It sees the rooms up to `planner.program`. Kernels live in `planner.kernels`; rows say what they support and cost.
"""
