"""`python -m planner.bench`: the library against its peers, each target line with what was measured.

Every comparison runs its programs in one process, interleaved, with a pause before each run, and takes
medians. All programs of a comparison must first return equal values and gradients. A whole run writes its
table and figures to a folder (docs/benchmarks by default); `--only` prints and writes nothing.
"""
