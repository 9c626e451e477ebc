"""JAX's compiler in a hurry, for the tests of what programs mean, which compile small ones by the thousand.

With these options a test of values and gradients takes 42 s for 56, one of second derivatives 81 s for 127, quiet, JAX
0.10.2. What programs allocate, and how long they take, is tested and measured as users compile them.
"""

from __future__ import annotations

import functools

import jax
import pytest

from planner.backends import jax_step


def _known(**options):
    """Those options that this version of XLA has."""
    found = {}
    for name, value in options.items():
        try:
            jax.jit(lambda: 0, compiler_options={name: value})()
        except jax.errors.JaxRuntimeError:
            continue
        found[name] = value
    return found


FAST = _known(
    xla_backend_optimization_level=0, xla_llvm_disable_expensive_passes=True, xla_cpu_use_fusion_emitters=False
)


def jit(function):
    """`jax.jit` with these options; inside of another jit there are no options."""
    return jax.jit(function, compiler_options=FAST)


@functools.lru_cache(maxsize=4096)
def _compiled(**parameters):
    return jit(functools.partial(jax_step.step_p.bind, **parameters))


@pytest.fixture
def fast_steps(monkeypatch):
    """Steps of eager calls are compiled with these options."""
    monkeypatch.setattr(jax_step, "compiled", _compiled)
