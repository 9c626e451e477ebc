"""What `planner.bench.card` measures on a graphics card, and a stand-in for a card.

Only the processes that measure or compile import these modules, because they load torch, Triton or JAX.
"""
