"""The rows of torch's table that run Triton kernels on CUDA cards, and what they cost.

A step that a kernel runs is one more row here. What kernels compute, and how, is in `planner/kernels`.
"""
