"""`contract` and `plan`, the functions that users call."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from planner.cost.device import CPU, CPU_OF_XLA, Device
from planner.language.cached import enter_held, forget_many_steps
from planner.language.dtypes import asked_dtype, dtype_name, is_inexact, itemsize
from planner.language.errors import PlannerError, PlannerTypeError, ShapeError
from planner.language.options import MODES, Options, Request, check_index_mode, is_name, read_precision
from planner.language.parse import parse, parse_sublists, unpack_operands
from planner.language.resolve import replace_labels, resolve_shapes, shape_of, shorten
from planner.language.spec import Operand, Spec, term_gathers
from planner.language.units import parse_bytes, parse_seconds
from planner.members import bind_first_member, bind_member
from planner.plan import Plan
from planner.program.calls import RunPlan
from planner.program.contraction import Contraction, at_numbers
from planner.program.frameworks import (
    HOW_GIVEN,
    Backend,
    beside_jax,
    framework_of,
    is_stand_in,
    jax_array_of,
    load_backend,
    operands_framework,
)
from planner.program.plan import bound_bytes
from planner.run import bind_plan, for_dynamo, torch_override
from planner.search.paths import explicit_path
from planner.search.verify import accept_plan
from planner.tune.autotune import autotune

# Repeated calls find the function that runs them here, by spec, options and the backend's signature of the arrays.
_RUNNERS: dict[Any, RunPlan] = {}
_SIGNATURES: dict[type, Callable[[Sequence[Any], Mapping[str, Any]], Any]] = {}
_CACHE_LIMIT = 4096
# The bytes that those of them hold which have a plan of their own, and how many bytes these may hold.
_ALONE: dict[Any, int] = {}
_MOST_ALONE = 32_000_000


def contract(
    spec: Any,
    *operands: Any,
    sizes: Mapping[str, int] | Sequence[int] | None = None,
    optimize: Any = "auto",
    minimize: Any = "time",
    memory_limit: int | str | None = None,
    retain_limit: int | str | None = None,
    index_mode: str = "raise",
    dtype: Any = None,
    precision: Any = None,
    deadline: float | None = None,
    **indices: Any,  # torch.jit.script cannot compile this: use torch.jit.trace or torch.export
) -> Any:
    """Contract arrays by an einsum spec that may gather and scatter through index arrays.

    Example:
        >>> import numpy as np
        >>> import planner
        >>> a, c, q = np.ones((4, 1, 2)), np.arange(6.0).reshape(3, 2, 1), np.array([2, 0, 0, 1])
        >>> planner.contract("nij, q[n]jk -> nik", a, c, q=q).ravel()
        array([9., 1., 1., 5.])

    Args:
        spec: the spec; or the operands in numpy's sublist form, ``contract(a, [0, 1], b, [1, 2], [0, 2])``.
        *operands: torch tensors, jax arrays or numpy arrays, never mixed; one by one, or all in one list or tuple.
            Beside a jax array numpy arrays, index arrays too, become jax arrays, as in `jax.numpy`. An object with a
            `__jax_array__` is that array.
        sizes: sizes of output axes that no input has, and of scattered dimensions by the letter of their index array;
            or the whole output shape. In the sublist form sizes go by label.
        optimize: "auto", "optimal", "greedy", another opt_einsum name, an explicit path, a `PathOptimizer`, or
            "measure": the best few plans are timed on these operands, once, and the fastest is remembered on disk.
        minimize: "time", "flops", "peak", "retained", "bytes", or a function of the plan's cost.
        memory_limit: most bytes that the forward and the backward program may each newly allocate; an int or a string
            such as ``"2 GiB"``. docs/limits.md says what it does not cover.
        retain_limit: most bytes that may stay alive for the backward program.
        index_mode: what happens to an index out of range: "raise", "drop" (it contributes nothing), "clip", or "nan"
            (results that read it are NaN; in gradients and in the output it adds nothing). Under "raise" and "nan"
            negative indices count from the end.
        dtype: dtype of the computation and the result. By default the framework promotes the operands' dtypes, and
            under ``torch.autocast`` it is the dtype that ``torch.einsum`` gives.
        precision: precision of matrix products, for jax only. torch has a global setting instead.
        deadline: the seconds after which a search ends with the best plan found until then. By default a search ends
            when it has done a fixed amount of work, so that the same call always gives the same plan.
        **indices: index arrays of any integer dtype, by letter.

    Returns:
        The result, an array of the operands' framework on their device.

    Raises:
        SpecError: the spec is malformed, or an index array is missing or unknown.
        ShapeError: shapes do not fit the spec or each other.
        IndexRangeError: an index is out of range under ``index_mode="raise"``.
        PlannerLimitError: no plan is within the limits.
        PlannerTypeError: the spec is not a string, an operand is not an array, a keyword is unknown, or a dtype is not
            supported.
        PlannerError: frameworks are mixed, an index array does not hold integers, or the value of an option is unknown.

    Source:
        The notation of numpy's einsum. `planner.language.derive` explains why index arrays may stand anywhere in it.
    """
    asked = (spec, sizes, optimize, minimize, memory_limit, retain_limit, index_mode, dtype, precision, deadline)
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_dynamo_compiling():  # `torch_compiles`, without its call
        return for_dynamo().contract(asked, operands, indices)
    run = call = None
    try:
        signature = _SIGNATURES[type(operands[0])](operands, indices)
        # A dictionary cannot be a key. `Request.hashable` makes the same tuple of it.
        named = None if sizes is None or type(sizes) is not dict else tuple(sorted(sizes.items()))
        call = (asked if named is None else (spec, named, *asked[2:])), signature
        run = _RUNNERS[call]
    except (KeyError, IndexError, TypeError, AttributeError):
        pass  # plan below, outside of this handler, so that errors there do not show this one as their context
    if run is None:
        return plan_and_run(Request(*asked), operands, indices, call)
    return run(operands, indices)


def plan_and_run(request: Request, operands: Sequence[Any], indices: Mapping[str, Any], call: Any = None) -> Any:
    """Make the first call of its kind: plan it, remember the function that runs it, and run it; `call` is its key."""
    if call is None or call[1] is None:  # otherwise nothing overrides the call
        listed = (x for given in operands if isinstance(given, list | tuple) for x in given)
        override = torch_override((request.spec, *operands, *listed, *indices.values()))
        if override is not None:
            defaults = contract.__kwdefaults__ or {}
            asked = {n: x for n, x in request._asdict().items() if n in defaults and x is not defaults[n]}
            return override(contract, request.spec, *operands, **asked, **indices)
    run = _run_of_member(request, operands, indices, call)
    if run is not None:
        return run(operands, indices)
    spec, operands = request.spec, unpack_operands(request.spec, operands)
    check_names(contract, indices)
    if not (is_name(spec) or isinstance(spec, Spec)):
        if framework_of(jax_array_of(spec)) is None or not operands:
            raise PlannerTypeError(
                f"the spec must be a string, not {type(spec).__name__}; an example is 'ij, jk -> ik'"
            )
        spec, operands, letters = parse_sublists((spec, *operands))
        request = request._replace(spec=spec, sizes=replace_labels(request.sizes, letters))
    if not isinstance(spec, Spec):
        parse(spec)
    operands, indices = beside_jax(operands, indices)
    backend = load_backend(framework := operands_framework(operands, indices))
    divided = backend.divided(operands, indices)
    if divided is not None:
        return divided(request, partial(_read_call, request, framework, operands, indices))
    key = run = None
    with contextlib.suppress(AttributeError, TypeError):
        # Options with dictionaries or lists cannot be keys in `contract`. Here they are tuples, so they can.
        _SIGNATURES.setdefault(type(operands[0]), backend.signature)
        arguments = (request.hashable(), backend.signature(operands, indices))
        run = _RUNNERS.get(arguments)
        key = arguments
    if run is None:
        contraction = _read_call(request, framework, operands, indices)
        held, interrupted = 0, False
        if key is not None:
            options = request.hashable()._replace(sizes=request.sizes)
            run, interrupted = bind_first_member(backend, options, operands, indices, contraction)
        if run is None:
            made = _plan(contraction, operands, indices)
            run = bind_plan(*(backend.bind_symbols(made, operands, indices, request.sizes) or (made,)))
            held, interrupted = bound_bytes(made), made.interrupted
        if key is not None and not interrupted:
            _remember(key, run, held)
    return run(operands, indices)


def run_met(spec: Any, signature: Any) -> RunPlan | None:
    """Return the function that runs a call of `contract` without options, if such a call was met before."""
    return _RUNNERS.get(((spec, *(contract.__kwdefaults__ or {}).values()), signature))


def forget_calls() -> None:
    """Forget the functions that run calls met before."""
    _ALONE.clear()  # first, so that no thread finds more of these
    _RUNNERS.clear()


def _run_of_member(request: Request, operands: Any, indices: Any, call: Any) -> RunPlan | None:
    """Return the function that runs a call of a family that was met before, and remember it; None for other calls."""
    try:
        framework = framework_of(operands[0])
        if framework is None or type(operands[0]) not in _SIGNATURES:
            return None
        backend = load_backend(framework)
        run = bind_member(backend, request, operands, indices)
        if run is not None:
            _remember(call or (request.hashable(), backend.signature(operands, indices)), run)
    except (IndexError, TypeError, AttributeError):  # operands in one list, or options that are no keys
        return None
    return run


def _remember(key: Any, run: RunPlan, held: int = 0) -> None:
    """Enter the function that runs the calls of a key, and the bytes it holds if it has a plan of its own."""
    enter_held(_RUNNERS, _ALONE, key, run, _CACHE_LIMIT, held, _MOST_ALONE)


def plan(
    spec: Any,
    *operands: Any,
    sizes: Mapping[str, int] | Sequence[int] | None = None,
    optimize: Any = "auto",
    minimize: Any = "time",
    memory_limit: int | str | None = None,
    retain_limit: int | str | None = None,
    index_mode: str = "raise",
    dtype: Any = None,
    precision: Any = None,
    deadline: float | None = None,
    backend: str | None = None,
    device: Device | str | None = None,
    mesh: Any = None,
    placements: Any = None,
    **indices: Any,
) -> Plan:
    """Choose how a contraction would be done, without computing it.

    Example:
        >>> import planner
        >>> p = planner.plan("ij, jk, kl -> il", (2, 30), (30, 40), (40, 5), backend="numpy")
        >>> p.cost.flops
        5600

    Args:
        spec: as in `contract`.
        *operands: arrays, stand-ins (`Operand`, `jax.ShapeDtypeStruct`, what `jax.typeof` returns), or shapes
            (float32); one by one, or all in one list or tuple. A list or tuple of integers is the shape of one operand.
        sizes: as in `contract`, and so are the next seven.
        optimize: how the tree is found. "measure" times plans only if all operands and index arrays are arrays.
        minimize: what the plan minimises.
        memory_limit: most bytes that the forward and the backward program may each newly allocate.
        retain_limit: most bytes that may stay alive for the backward program.
        index_mode: what happens to an index out of range.
        dtype: dtype of the computation and the result.
        precision: precision of matrix products, for jax.
        deadline: the seconds after which a search ends with the best plan found until then.
        backend: "torch", "jax" or "numpy". By default it is the arrays' framework, or else one that is already
            imported.
        device: the rates of the machine that times are predicted for, or the name of a preset such as "h100". By
            default these are the rates that `python -m planner calibrate` measured on this machine, or else the preset
            of the arrays' device.
        mesh: devices that the arrays are split over, as `planner.shard` takes them. The plan is the one with the least
            time on all of them together, and all its figures are those of one device.
        placements: how the arrays are split: what `planner.shard` returns; or a mapping, from the number of an operand,
            the letter of an index array, or "result", to a placement as `planner.shard` proposes it. Arrays that are
            not named lie as their own sharding says, or else whole on each device.
        **indices: index arrays, stand-ins for them or their shapes, by letter.

    Returns:
        The plan. Call it on arrays, print it, or look at `cost`, `steps`, `path` and `alternatives()`.

    Raises:
        SpecError: the spec is malformed, or an index array is missing or unknown.
        ShapeError: shapes do not fit.
        PlannerLimitError: no plan is within the limits. The message names limits that succeed.
        SearchLimitError: the problem is too large for any search, or too large to address.
        PlannerError: an option is unknown, the backend's framework is not installed, or a placement does not fit.
    """
    check_names(plan, indices)
    operands = tuple(unpack_operands(spec, operands))
    if not (is_name(spec) or isinstance(spec, Spec)):
        spec, operands, letters = parse_sublists((spec, *operands))
        sizes = replace_labels(sizes, letters)
    operands, indices = beside_jax(operands, indices)
    if backend is None:
        given = (*operands, *indices.values())
        if any(map(is_stand_in, given)):
            backend = "jax"
        elif arrays := [x for x in given if framework_of(x) is not None]:
            backend = operands_framework(arrays, {})
        else:
            backend = next((name for name in ("torch", "jax") if name in sys.modules), "numpy")
    if not is_name(backend):
        raise PlannerError(f"backend={backend!r:.80} is not a name: take one of 'torch', 'jax', 'numpy'")
    request = Request(
        spec, sizes, optimize, minimize, memory_limit, retain_limit, index_mode, dtype, precision, deadline
    )
    contraction = _read_call(request, backend, operands, indices, device)
    if mesh is not None or placements is not None:
        from planner.search.devices.mesh import put_on_mesh

        contraction = put_on_mesh(contraction, operands, indices, mesh, placements)
    return _plan(contraction, operands, indices)


def _plan(contraction: Contraction, operands: Sequence[Any], indices: Mapping[str, Any]) -> Plan:
    """Choose the plan of a contraction of some arrays."""
    record = accept_plan(contraction)
    if contraction.options.optimize == "measure":
        with load_backend(contraction.backend).unwatched():
            record = autotune(record, operands, indices)
    return Plan.of(record)


def _read_call(
    request: Request,
    framework: str,
    operands: Sequence[Any],
    indices: Mapping[str, Any],
    device: Device | str | None = None,
) -> Contraction:
    """Check a request, and return what it asks for."""
    forget_many_steps()
    spec = request.spec
    check_index_mode(request.index_mode)
    precision = read_precision(request.precision, framework)
    backend = load_backend(framework)
    described = tuple(_describe(backend, operand, number) for number, operand in enumerate(operands))
    index_shapes = {}
    for name, index in indices.items():
        if framework_of(index) is not None or is_stand_in(index):
            backend.check_index(name, index)
            index = backend.numbers(index.shape)
        index_shapes[name] = shape_of(index, f"index array {name!r}")
    shapes = [operand.shape for operand in described]
    try:
        resolved = resolve_shapes(spec, shapes, index_shapes, backend.numbers(request.sizes))
    except ShapeError as error:
        raise type(error)(f"{error}\n    in {_call_text(spec, shapes, index_shapes, request.sizes)}") from None
    dtypes = [operand.dtype for operand in described]
    device = (_read_device(device, framework) or backend.device(operands)).for_call(indices.values())
    if request.dtype is None:
        compute = backend.result_dtype(dtypes, operands, resolved.spec, device)
    else:
        compute = asked_dtype(request.dtype)
    itemsize(compute)
    reads = any(term_gathers(term) for term in resolved.spec.inputs)
    if MODES[request.index_mode].unmarked and reads and not is_inexact(compute):
        raise PlannerError(
            f"index_mode={request.index_mode!r}: the result is {compute}, which has no NaN for an index out of range; "
            "pass dtype='float32', or index_mode='drop' to leave such entries out"
        )
    backend.check_devices(operands, indices)
    optimize = request.optimize
    if not (optimize is None or is_name(optimize) or callable(optimize)):
        optimize = explicit_path(optimize)
    options = Options(
        optimize=optimize,
        minimize=request.minimize,
        memory_limit=parse_bytes(request.memory_limit, "memory_limit"),
        retain_limit=parse_bytes(request.retain_limit, "retain_limit"),
        precision=precision,
        deadline=parse_seconds(request.deadline, "deadline"),
    )
    # A gradient exists only if the computation is in floats.
    if not compute.startswith(("float", "bfloat", "complex")):
        described = tuple(dataclasses.replace(operand, requires_grad=False) for operand in described)
    contraction = Contraction(
        text=str(spec),
        resolved=resolved,
        index_shapes=tuple((name, index_shapes[name]) for name in resolved.spec.arrays),
        operands=described,
        dtype=compute,
        index_mode=request.index_mode,
        backend=framework,
        device=device,
        options=options,
    )
    return at_numbers(contraction)


def _read_device(device: Device | str | None, framework: str) -> Device | None:
    """Return a device, or the preset of a name. That of CPUs has the rates of XLA in JAX."""
    if is_name(device):
        device = Device.preset(device)
    if framework == "jax" and device == CPU:
        return CPU_OF_XLA
    if device is not None and not isinstance(device, Device):
        raise PlannerError(
            f"device={device!r:.80} is not a planner.Device: it holds the rates that times are predicted by"
        )
    return device


def check_names(call: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuse keywords of several letters that are not options: index arrays have one letter, so one is misspelt."""
    for name in names:
        if len(name) != 1:
            options = [p.name for p in inspect.signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY]
            close = difflib.get_close_matches(name, options, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"options are {', '.join(options)}"
            raise PlannerTypeError(f"{name!r} is not an option, and the name of an index array is one letter: {hint}")


def _call_text(spec: str | Spec, shapes: Sequence[Any], index_shapes: Mapping[str, Any], sizes: Any) -> str:
    """Return the text of a call with shapes in place of arrays, shortened to a readable length."""
    arguments = [shorten(repr(str(spec))), *map(str, shapes[:20])]
    if len(shapes) > 20:
        arguments.append("...")
    arguments += [f"{name}={shape}" for name, shape in [*index_shapes.items()][:20]]
    if sizes is not None:
        arguments.append(f"sizes={sizes!r:.80}")
    return ", ".join(arguments)[:600]


def _describe(backend: Backend, operand: Any, number: int) -> Operand:
    """Return the stand-in that describes an array, a stand-in or a shape."""
    what = f"operand {number}"
    if isinstance(operand, (tuple, list)):
        if any(framework_of(n) is not None and getattr(n, "shape", ()) != () for n in operand):
            raise PlannerTypeError(f"{what} is a {type(operand).__name__} of arrays: {HOW_GIVEN}")
        operand = Operand(tuple(operand))
    if isinstance(operand, Operand):
        described = dataclasses.replace(operand, shape=shape_of(operand.shape, what))
        if operand.strides is not None and len(operand.strides) != len(described.shape):
            raise ShapeError(
                f"{what} has {len(described.shape)} dimensions, but {len(operand.strides)} strides: give one for each"
            )
        if not all(hasattr(stride, "__index__") for stride in operand.strides or ()):
            raise ShapeError(f"{what} has the strides {operand.strides!r:.80}: strides are integers")
        if operand.requires_grad not in (True, False):
            raise PlannerTypeError(f"{what} has requires_grad={operand.requires_grad!r:.80}: give True or False")
    elif framework_of(operand) != backend.name and not (backend.name == "jax" and is_stand_in(operand)):
        raise PlannerError(
            f"{what} is a {type(operand).__name__}, which is not a {backend.name} array: "
            "convert it, or pass planner.Operand(shape, dtype) to plan without an array"
        )
    else:
        try:
            described = backend.operand(operand)
        except PlannerError as error:
            raise PlannerError(f"{what} {error}") from None
    try:
        return dataclasses.replace(described, dtype=dtype_name(described.dtype))
    except PlannerError as error:
        raise PlannerTypeError(f"{what}: {error}") from None
