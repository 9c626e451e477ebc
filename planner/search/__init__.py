"""The searches: from a contraction to the best tree, program and loop within the limits.

Backends never import this room. A new search is a function of a `SearchSpace` here, and `choose.py` takes the best.
"""
