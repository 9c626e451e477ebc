"""Rows sorted by the group that their index names, in torch and in JAX; the other kernels work on sorted rows.

Kernels know arrays and nothing of specs or plans.
"""
