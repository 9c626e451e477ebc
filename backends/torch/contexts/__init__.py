"""What a plan meets around a call in torch: modes, transforms, compilers and tracers.

A new context is a module here. What computes lives in the folder above.
"""
