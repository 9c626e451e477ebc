"""What the searches make and backends run: ops, trees, programs of steps, loops, and the plan as a record.

`implementations.py` is the contract of a backend and of a row in its table; `callbacks.py` is the one way back up.
"""
