"""Searches over all trees of a network, or over those of a path.

They know the network, its steps and their prices. What to search, and which result to take, is decided outside.
"""
