"""Search: exact dynamic programming, and paths from opt_einsum above its size."""
