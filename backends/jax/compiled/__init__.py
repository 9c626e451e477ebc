"""The memory that XLA takes for a program as a whole. `peak.py` is what others import; the rest may change with XLA."""
