"""Names of partitioned calls that are the same in every process, so that the compilation cache finds their programs.

JAX names a partitioned call by the address of the object that holds its functions. So no two programs that hold one are
alike. Here a call is named by what it computes. XLA then asks by this name for the program of one device; calls of one
name whose arrays are split alike share that program.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pathlib
import sys
import types
from typing import Any

from jax.interpreters import mlir
from jaxlib import xla_client

TARGET = "planner_partitioned_call"
# What JAX knows of a call, by its name, and the programs of one device. Both forget the oldest.
_CALLS: dict[bytes, Any] = {}
_PROGRAMS: dict[tuple[str, ...], Any] = {}
_MOST_CALLS, _MOST_PROGRAMS = 4096, 256


def name_call(operation: Any, text: str, context: Any) -> None:
    """Rename a partitioned call that JAX has just lowered.

    Args:
        operation: the operation of the lowered program.
        text: says what the call computes, alike in every process.
        context: the context of the module. It need not keep what JAX knows of the call; a program that does cannot be
            pickled.
    """
    with contextlib.suppress(ImportError):
        callbacks = _register()
        info = context.keepalives.pop()
        mesh = [*info.mesh.shape.items()]
        digest = hashlib.sha256(f"{_code()} {text} {mesh} {context.platforms}".encode()).hexdigest()
        # The call is partitioned after the program is lowered. JAX asks for no more of the module than this.
        info.module_context = types.SimpleNamespace(platforms=context.platforms, backend=context.backend)
        _put(_CALLS, digest.encode(), info, _MOST_CALLS)
        callbacks[digest.encode()] = info
        operation.attributes["call_target_name"] = mlir.ir.StringAttr.get(TARGET)
        operation.attributes["backend_config"] = mlir.ir.StringAttr.get(digest)


@functools.lru_cache(maxsize=1)
def _code() -> str:
    """Return a digest of the code that computes: other code makes other programs."""
    folder = pathlib.Path(sys.modules["planner"].__file__ or "").parent
    folders = ("language", "program", "kernels/*", "backends/common", "backends/jax", "backends/jax/*")
    files = sorted(path for each in folders for path in folder.glob(f"{each}/*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def _put(store: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    store.pop(key, None)
    store[key] = value
    if len(store) > most:
        store.pop(next(iter(store)), None)


@functools.lru_cache(maxsize=1)
def _register() -> Any:
    """Tell XLA who partitions calls of our name: JAX's own functions. Return where they look for calls.

    Raises:
        ImportError: a version of JAX without these names. Its programs run, and no cache finds them.
    """
    from jax._src import custom_partitioning as own
    from jax._src.xla_bridge import register_plugin_callbacks

    def partition(*described: Any) -> Any:
        """Return the program of one device, from the shapes and shardings of a call, and its name."""
        key = tuple(map(str, described))
        if key not in _PROGRAMS:
            _put(_PROGRAMS, key, own._custom_partitioning_partition(*described), _MOST_PROGRAMS)
        return _PROGRAMS[key]

    register = functools.partial(
        xla_client.register_custom_call_partitioner,
        TARGET,
        own._custom_partitioning_propagate_user_sharding,
        partition,
        own._custom_partitioning_infer_sharding_from_operands,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    register_plugin_callbacks(register)  # plugins of other devices have tables of their own
    return own._sharding_callbacks
