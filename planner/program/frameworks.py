"""What a backend must provide. Finds the framework of an array, and loads the backend for it.

It never imports a framework that is not in use.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Protocol

from planner.cost.device import Device
from planner.cost.figures import StepCost
from planner.language.errors import PlannerError, PlannerTypeError
from planner.language.spec import Gather, Operand, Spec
from planner.program.calls import Member, RunPlan, Stepwise
from planner.program.contraction import Contraction
from planner.program.implementations import Table
from planner.program.ops import Op
from planner.program.plan import PlanRecord
from planner.program.program import CompiledPeak, Programs, Step, Variable
from planner.program.tree import Tree

BACKENDS = ("torch", "jax", "numpy")
# Errors about a list among the operands say this.
HOW_GIVEN = "give the operands one by one, or all of them in one list or tuple"
# What `Backend.kept_copies` returns.
KeptCopies = tuple[int, list[Step], list[Step]] | None


class Backend(Protocol):
    """What `planner` asks of a framework. Backends inherit this class, so that type checkers compare them with it.

    Attributes:
        name: name of the framework, as in `planner.program.frameworks`.
        table: the backend's implementations.
        ops: the array functions that `planner.backends.common.stock.ArrayOps` lists.
        compiles: whether the framework may fuse or reorder steps, so that peaks can differ from the plan's.
        strided: whether arrays have strides. Then views are free, and plans depend on layouts.
        compiled_peak: returns the bytes that a compiler takes for a program, from the steps, the variables, those that
            the caller owns, those that outlive it, the output's gradient or None, and the index mode.
        conjugated_bytes: returns the bytes of conjugates that a backward program allocates, from the contraction, the
            steps, the variables, and which of them is the output's gradient; None if gradients conjugate nothing.
        einsum_cost: returns what a stock step costs on a device by the framework's own functions, which may copy less.
        einsum_copies: for each input of a stock step, the bytes of its copy that autograd keeps behind an einsum.
        kept_copies: returns the bytes of copies that a plan keeps in place of operands, because autograd saves them and
            takes less time, and the steps of both programs, which make and read these copies; None if a plan must copy
            nothing. It takes the contraction, its tree, the steps of both programs, and whether the plan's family keeps
            copies, if known.
        autograd_rows: for each row that autograd may run, the rows of the gradients that it computes.
        call_seconds: returns what a call takes beside its steps, 0 if autograd runs these; None for long plans.
        order_seconds: returns how much longer two steps take because of the order of axes of a result between them,
            beyond their prices. It takes the step, the step that reads its result, and the device.
    """

    name: str
    table: Table
    ops: Any
    compiles: bool = False
    strided: bool = False
    compiled_peak: CompiledPeak | None = None
    conjugated_bytes: Callable[[Contraction, Sequence[Step], Sequence[Variable], int], int] | None = None
    einsum_cost: Callable[[Op, StepCost, Device], StepCost] | None = None  # None if they take as much
    einsum_copies: Callable[[Op], Sequence[int]] | None = None  # None if autograd keeps no copies
    kept_copies: Callable[[Contraction, Tree, Sequence[Step], Sequence[Step], bool | None], KeptCopies] | None = None
    autograd_rows: Mapping[str, Sequence[str]] | None = None
    call_seconds: Callable[[Contraction, Tree, Programs], float | None] | None = None
    order_seconds: Callable[[Op, Op, Device], float] | None = None  # None if no order takes longer

    def operand(self, array: Any) -> Operand:
        """Describe an array."""

    def fuses_cast(self, source: str, dtype: str) -> bool:
        """Return whether steps without index arrays read operands of a dtype as they are, and compute in another."""
        return False

    def numbers(self, sizes: Any) -> Any:
        """Return a shape, or `sizes=` of a call, in numbers: for a tracer's symbols the sizes that it traces with."""
        return sizes

    def signature(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> Hashable:
        """Return everything about some arrays that a plan depends on, in microseconds, because every call asks for it.

        Law: calls of equal signatures and options may run the same plan.

        Raises:
            AttributeError: one of them is not an array.
        """
        key: list[Any] = [fact for x in operands for fact in (type(x), x.shape, x.dtype)]
        for name, q in indices.items():
            key += (name, type(q), q.shape, q.dtype)
        return tuple(key)

    def result_dtype(self, dtypes: Sequence[str], operands: Sequence[Any], spec: Spec, device: Device) -> str:
        """Return the dtype of a contraction whose caller asks for none. Operands may be stand-ins or shapes."""
        ...

    def device(self, operands: Sequence[Any]) -> Device:
        """Return the rates of the device that the operands are on."""
        ...

    def check_index(self, name: str, index: Any) -> None:
        """Refuse an index array whose dtype is not an integer type.

        Raises:
            PlannerError: the dtype is not an integer type. The message names the array.
        """

    def check_devices(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Refuse arrays on different devices, because nothing is moved silently. Stand-ins are on no device.

        Raises:
            PlannerError: two arrays are on different devices. The message names them.
        """

    def group(self, q: Any, size: int, index_mode: str) -> Any:
        """Prepare an index array for many calls.

        Law: a call with the prepared array gives the same result as a call with `q`. Under "raise" this function
        refuses every array that such a call would refuse.

        Raises:
            IndexRangeError: an index is out of range under ``index_mode="raise"``. Traced values cannot be checked.
        """
        ...

    def in_range(self, q: Any, gather: Gather, index_mode: str) -> tuple[Any, bool]:
        """Return an index array with values in [0, size], and whether the value `size`, "no row", can occur.

        Where values cannot be seen, an entry that should be refused becomes `size`.

        Raises:
            IndexRangeError: as `group`.
            PlannerError: `q` was prepared for another size or mode.
        """
        ...

    def is_in_range(self, q: Any, gather: Gather, index_mode: str) -> bool:
        """Return whether all entries are known to be in range; False if `in_range` finds that in the same time.

        Raises:
            PlannerError: `q` was prepared for another size or mode.
        """
        return False

    def bind(self, plan: PlanRecord) -> RunPlan:
        """Return the function that runs a plan on operands and index arrays."""
        ...

    def bind_family(self, plan: PlanRecord) -> Callable[[Member], RunPlan] | None:
        """Return what makes the function that runs the plan of a member, in microseconds.

        None if each member must be bound by itself. Law: the function does what `bind` makes of the member's own plan.

        Args:
            plan: the plan of a family's representative, whose steps all run at any sizes.
        """
        return None

    def bind_symbols(
        self, plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any], sizes: Any
    ) -> tuple[Any, ...] | None:
        """Return what to give to `planner.run.bind_plan` for a call at symbols for sizes; None if they are numbers."""
        return None

    def family_signature(
        self, operands: Sequence[Any], indices: Mapping[str, Any]
    ) -> tuple[Hashable, list[tuple[int, ...]]] | None:
        """Return all that a family depends on but the sizes, and the shapes of arrays; None if they are bound alone."""
        return None

    def divided(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return what runs calls of arrays that lie on several devices; None if these do not, or the framework does."""
        return None

    def routing(self, route: Callable[..., Any], every: bool = False) -> AbstractContextManager[object]:
        """Return a context in which `route` gets calls of einsum, or of `every` function: it, arguments, keywords."""

    def compiled_bytes(self, plan: PlanRecord) -> int | None:
        """Compile both programs of a plan and return the larger peak, kept values counted; None if nothing tells it."""
        return None

    def refuse_dataless(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Refuse arrays that hold no values: tracers, arrays inside of transforms, and the framework's own stand-ins.

        Raises:
            PlannerError: an array holds no values, so it cannot be measured.
        """
        ...

    def stepwise(
        self,
        plan: PlanRecord,
        operands: Sequence[Any],
        indices: Mapping[str, Any],
        gradient: Any = None,
        kept: Mapping[int, Any] | None = None,
    ) -> Stepwise:
        """Return a plan's backward program, or without an output gradient its forward program, to be run step by step.

        Law: if all values are finite, running its steps in order computes what `bind` computes.

        Args:
            plan: the plan.
            operands: the arrays that the plan is called with.
            indices: the index arrays that the plan is called with.
            gradient: the output's gradient; None for the forward program.
            kept: for the backward program, the kept values by the number of their variable.
        """

    def trial(self, plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Callable[[], None] | None:
        """Return a function that runs a plan on arrays and waits for the end; None if the arrays hold no values.

        The run includes the gradients if the plan has any. It does not change the arrays.
        """
        ...

    def unwatched(self) -> AbstractContextManager[object]:
        """Return a context for measuring. Tools that watch the operators around a call do not see what runs in it."""
        return nullcontext()

    def to_numpy(self, array: Any, dtype: str) -> Any:
        """Return an array's values, cast to a dtype, as a NumPy array: without a copy if they lie in the host's memory.

        Values of a dtype that NumPy lacks are returned as their bits. Only `from_numpy` can read those.
        """
        ...

    def from_numpy(self, values: Any, dtype: str, device: str) -> Any:
        """Return the array of a dtype that `to_numpy` turned into `values`; `device` is the name of its device.

        Raises:
            PlannerError: the framework would take another dtype.
        """
        ...

    def pins_tiles(self) -> bool:
        """Whether the tiles of a kernel depend on the problem alone, and never on measurements."""
        return False

    def environment(self, operands: Sequence[Any]) -> dict[str, str]:
        """Return what the speed depends on besides the plan: versions, hardware and settings."""


@lru_cache(maxsize=8)
def load_backend(name: str) -> Backend:
    """Import a backend by name.

    Raises:
        PlannerError: there is no such backend, or its framework is not installed.
    """
    if name not in BACKENDS:
        raise PlannerError(f"backend {name!r:.80} is unknown: take one of {', '.join(BACKENDS)}")
    if importlib.util.find_spec(name) is None:
        raise PlannerError(f"{name} is not installed: pip install 'contraction-planner[{name}]'")
    backend: Backend = importlib.import_module(f"planner.backends.{name}.backend").backend
    return backend


_FRAMEWORKS: dict[type, str | None] = {}


def framework_of(array: Any) -> str | None:
    """Return the name of an array's framework: "torch", "jax" or "numpy"; None for anything else."""
    kind, torch = type(array), sys.modules.get("torch")
    if torch is not None and torch.compiler.is_dynamo_compiling():  # it would guard the whole dictionary
        return _find_framework(array)
    if kind not in _FRAMEWORKS:
        _FRAMEWORKS[kind] = _find_framework(array)
    return _FRAMEWORKS[kind]


def _find_framework(array: Any) -> str | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, (jax.Array, jax.core.Tracer)):
        return "jax"
    numpy = sys.modules["numpy"]
    if isinstance(array, (numpy.ndarray, numpy.generic)):
        return "numpy"
    prepared = getattr(type(array), "prepared_framework", None)
    return prepared if prepared in BACKENDS else None


def is_stand_in(x: Any) -> bool:
    """Return whether something describes an array of JAX: a `jax.ShapeDtypeStruct`, or what `jax.typeof` returns."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.ShapeDtypeStruct | jax.core.ShapedArray)


def jax_array_of(x: Any) -> Any:
    """Return the array of an object with a `__jax_array__`, such as a parameter of a module; all else as it is."""
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(type(x), "__jax_array__") or framework_of(x) is not None:
        return x
    array, numpy = x.__jax_array__(), sys.modules["numpy"]
    if isinstance(array, (numpy.ndarray, numpy.generic)):
        return jax.numpy.asarray(array)
    return array if framework_of(array) == "jax" else x


def beside_jax(operands: Sequence[Any], indices: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arrays of a call.

    Those that objects have as their `__jax_array__` take their place. NumPy arrays beside an array of JAX become JAX
    arrays, as in `jax.numpy`.
    """
    operands, indices = tuple(map(jax_array_of, operands)), {name: jax_array_of(q) for name, q in indices.items()}
    found = {"jax" if is_stand_in(x) else framework_of(x) for x in (*operands, *indices.values())}
    if len(found) == 1 or "jax" not in found:
        return operands, indices
    numpy, jax = sys.modules["numpy"], sys.modules["jax"]

    def converts(x: Any) -> bool:
        if not isinstance(x, (numpy.ndarray, numpy.generic)):
            return False
        return x.dtype.isnative and bool(x.dtype == bool or jax.numpy.issubdtype(x.dtype, jax.numpy.number))

    def index(q: Any) -> Any:
        prepared = getattr(type(q), "prepared_framework", None) == "numpy"
        if not prepared and not converts(q):
            return q
        wide = jax.config.jax_enable_x64
        if not prepared and q.dtype.kind in "iu" and q.dtype.itemsize == 8 and q.size:
            # In narrower integers an index out of range could become one in range, and errors show it as it is.
            limits = numpy.iinfo("int32" if q.dtype.kind == "i" else "uint32")
            wide = wide or q.min() < limits.min or q.max() > limits.max
        with jax.ensure_compile_time_eval(), jax.enable_x64(bool(wide)):  # so that it can be checked under `jit`
            if prepared:
                return load_backend("jax").group(jax.numpy.asarray(q.values), q.size, q.mode)
            return jax.numpy.asarray(q)

    converted = tuple(jax.numpy.asarray(x) if converts(x) else x for x in operands)
    return converted, {name: index(q) for name, q in indices.items()}


def labelled(operands: Sequence[Any], indices: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the arrays of a call, each with its name in error messages."""
    named = [(f"operand {number}", operand) for number, operand in enumerate(operands)]
    return named + [(f"index array {name!r}", index) for name, index in indices.items()]


def operands_framework(operands: Sequence[Any], indices: Mapping[str, Any]) -> str:
    """Return the one framework of all operands and index arrays.

    Raises:
        PlannerError: an argument is not an array, or frameworks are mixed. The message names the argument.
    """
    if not operands:
        raise PlannerError("no operands were given")
    first: str | None = None
    for label, array in labelled(operands, indices):
        framework = framework_of(array)
        if framework is None:
            hint = f"; {HOW_GIVEN}" if isinstance(array, (list, tuple)) else ""
            raise PlannerTypeError(
                f"{label} is a {type(array).__name__}, not an array of torch, jax or numpy: convert it first{hint}"
            )
        if first is not None and framework != first:
            raise PlannerError(f"{label} is a {framework} array, but operand 0 is of {first}: convert one of them")
        first = first or framework
    assert first is not None
    return first
