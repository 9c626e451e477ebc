"""Products of two operands in torch: what its own einsum copies, and rows for what it would copy or multiply slowly.

A row is another way to compute one step. Any module may ask `einsum.py` what torch's own calls take.
"""
