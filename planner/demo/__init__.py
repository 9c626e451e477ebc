"""`python -m planner demo`: the four documents that the library came from, run again beside it.

Each author compared ways to write one contraction and asked why they differ. The demo runs those ways and
`planner.contract` on the same arrays, in torch and JAX, forward and with gradients. It measures the time, the
peak memory and the memory kept for the backward pass of each way, checks that all values and gradients are
equal, and answers the authors' questions with the figures that it measured.

`ways` holds what the authors wrote, `cases` what is compared, `runs` measures, `report` prints the comparisons
and `answers` the answers; `command` reads the options and goes through the cases.
"""
