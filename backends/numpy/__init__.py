"""The backend that needs NumPy alone: it runs each step in its simplest form, and computes no gradients.

It may import NumPy, `backends.common` and planner's rooms up to `planner.program`; a new framework starts from it.
"""
