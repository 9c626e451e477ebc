"""The Triton kernel of a product in tiles, its tile sizes, and how it addresses operands through tables of rows.

The Triton kernels for grouped products and gathered dots call this one.
"""
