"""What work costs: FLOPs, bytes and seconds, the rates of devices, memory layouts, and limits on bytes.

A new objective is one more entry in `objective.py`. Nothing here knows how a contraction is searched or run.
"""
