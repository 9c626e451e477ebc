"""Dot products of queries with the members of a pool that an index names, and their gradients.

One module a framework: torch, Triton and JAX.
"""
