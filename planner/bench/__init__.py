"""`python -m planner.bench` compares the library with its peers, and prints each target beside the measured figure.

Every comparison runs its programs in one process, interleaved, with a pause before each run, and takes medians. First,
all programs of a comparison must return equal values and gradients. A complete run writes its table and figures to a
folder (docs/benchmarks by default); `--only` prints them and writes nothing.
"""
