"""The Triton kernel of a product in tiles, with operands addressed by tables of rows; its tile sizes and launches.

The kernels of grouped products and gathered dots are calls of this one.
"""
