"""`optimize="measure"`: plans and tilings are timed on the arrays of a call, and the fastest is remembered on disk.

Times are taken here and nowhere else in a call. What a file of the store says is checked before it is used.
"""
