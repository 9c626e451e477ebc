"""What all frameworks share: the stock way to evaluate a step, rows of the table, masks, and loops over slices.

Everything here is written over a few array functions, `ArrayOps`, which each framework provides.
"""
