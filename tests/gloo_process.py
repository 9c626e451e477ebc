"""One of two processes with four simulated devices each, which run cases of `sharded_cases.py` together.

Its arguments are the number of the process, the port at which the two meet, and which tests to run, as pytest's `-k`.
JAX must know of the other process before it has made an array.
"""

from __future__ import annotations

import pathlib
import sys

import jax
import pytest


def main():
    number, port, chosen = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number), initialization_timeout=30)
    assert (jax.local_device_count(), jax.device_count()) == (4, 8)
    file = pathlib.Path(__file__).with_name("sharded_cases.py")
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", chosen, str(file)]))


if __name__ == "__main__":
    main()
