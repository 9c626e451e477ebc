"""JAX's compiler in a hurry, for tests that compile small programs by the hundred.

What is tested with it is what programs mean, in other machine code than users have: without optimisation, and without
the generator of fused loops. On 2026-11-23 (JAX 0.10.2, two cores, quiet) a test of values and gradients took 42 s with
it, 56 s before; one of second derivatives 101 s, before 127.
"""

from __future__ import annotations

import functools

import jax
from conftest import PROFILE

from planner.backends.jax import backend as jax_backend
from planner.backends.jax import step as jax_step

# It has the steps of eager calls by name: what a test puts in their place must not be what it imports.
assert jax_backend.compile_step is jax_step.compile_step


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


# What users have, whatever `conftest` set for the process.
AS_USERS = _known(
    xla_backend_optimization_level=3,
    xla_llvm_disable_expensive_passes=False,
    xla_cpu_parallel_codegen_split_count=32,
    xla_cpu_use_fusion_emitters=True,
)
# Buffers are assigned before LLVM begins: for their sizes it need not optimise.
SIZES_ALONE = AS_USERS | _known(
    xla_backend_optimization_level=0, xla_llvm_disable_expensive_passes=True, xla_cpu_parallel_codegen_split_count=1
)
# In the nightly run nothing is compiled in a hurry.
FAST = AS_USERS if PROFILE == "nightly" else SIZES_ALONE | _known(xla_cpu_use_fusion_emitters=False)


def jit(function, options=FAST):
    """`jax.jit` of the outermost function: inside of it there are no options."""
    return jax.jit(function, compiler_options=options)


def compiled_once():
    """A context for large programs that no other test makes: they are not stored for other tests."""
    return jax._src.config.enable_compilation_cache(False)


@functools.lru_cache(maxsize=4096)
def compiled(**parameters):
    """In place of `jax_step.compile_step`: the steps of eager calls."""
    return jit(functools.partial(jax_step.step_p.bind, **parameters))


@functools.lru_cache(maxsize=4096)
def compiled_as_users(**parameters):
    """The same, as users compile them."""
    return jit(functools.partial(jax_step.step_p.bind, **parameters), AS_USERS)


def for_sizes_alone(monkeypatch):
    """Have programs compiled for what XLA says of their buffers, not to run fast."""
    inner = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, options=SIZES_ALONE: inner(self, options))
