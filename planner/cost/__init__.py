"""What work costs: FLOPs, bytes and seconds, the rates of devices, memory layouts, and limits on bytes.

A new objective is a name and two keys in `objective.py`. Nothing here knows how a contraction is searched or run;
`rates.py` and `store.py` read and write the rates that were measured on this machine.
"""
