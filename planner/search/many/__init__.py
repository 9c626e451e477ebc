"""Trees for more operands than the exact searches take: greedy ones, improved part by part.

Costs are estimates from sizes here. What is found is priced outside, step by step.
"""
