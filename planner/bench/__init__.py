"""Benchmarks: the library beside its peers, its kernels on a card, and Triton kernels compiled without a card.

A new comparison is a function that yields a `Result`, and a row of `PARTS` in `command.py`; whoever changes a target
also updates docs/benchmarks.
"""
