"""Rows sorted by the group that their index names; the other kernels work on sorted rows.

Each framework has its own `Groups` with the same meaning: `order` lists the row numbers, group after group, and
`offsets` says where each group starts in it. A row with the group number `size` is dropped: it belongs to no group, and
comes last. On a card Triton sorts them and checks their indices; all kernels of Triton are started from here too.
Kernels know arrays, but nothing about specs or plans.
"""
