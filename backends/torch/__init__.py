"""The backend of PyTorch: autograd, `torch.func`, `torch.compile`, and the rows for CPUs and CUDA cards.

It sees the rooms up to `planner.program`. Kernels live in `planner.kernels`; rows say what they support and cost.
"""
