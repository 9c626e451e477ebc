"""The language: specs, how they are read, completed by shapes, and derived from one another; dtypes, options, errors.

Nothing here knows a framework, a cost or a plan. A new idea about einsum is best a function from Spec to Spec here.
"""
