"""Rows added up by group, in the order of the rows: no atomics, so results repeat bit by bit.

The stock ways of torch and JAX are in their backends; this folder holds the Triton kernel.
"""
