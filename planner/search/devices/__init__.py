"""Plans for several devices: the contraction of one device's parts, and what the devices exchange for it.

The sums between devices take time, so the search knows their prices.
"""
