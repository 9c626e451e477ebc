"""`python -m planner demo`: the four documents the library came from, run again beside it.

Each seed's author compared ways to write one contraction and asked why they differ. The demo runs those
ways and `planner.contract` on the same arrays in torch and JAX, forward and with gradients; measures time,
peak and retained bytes of each; checks that all values and gradients are equal; and answers each question in
a sentence built from the figures just measured.
"""
