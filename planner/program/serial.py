"""Plans as JSON: dataclasses by name, tuples as lists, infinite rates as null. Reading one never runs code."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from planner.cost.device import Device
from planner.cost.figures import Cost, PlanCost, StepCost
from planner.cost.layout import Layout
from planner.cost.objective import OBJECTIVES, step_key
from planner.language.dtypes import ITEMSIZES
from planner.language.errors import PlannerError
from planner.language.options import MODES, PRECISIONS, Options
from planner.language.resolve import Resolved
from planner.language.spec import Gather, Operand, Spec
from planner.program.build import Lowerer, build
from planner.program.contraction import Contraction, OnMesh
from planner.program.frameworks import BACKENDS, load_backend
from planner.program.guards import add_guards
from planner.program.implementations import LOOP
from planner.program.loops import loop_node, loop_over
from planner.program.ops import Cast, Einsum, Guard, JointGradient, Op, PricedImplementation
from planner.program.plan import Loop, LoopGradient, PlanRecord
from planner.program.program import Program, Programs, Step, Variable
from planner.program.tree import Leaf, Node, flatten, nodes_of, tree_depth, unflatten

VERSION = 1
# Deeper trees are written as lists: programs that read JSON refuse what is nested too deeply.
MOST_DEPTH = 50


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Forgotten:
    """Stands for a function among the options of a plan that was read from JSON. Only the function's name is known."""

    name: str

    def __call__(self, *arguments: object, **named: object) -> NoReturn:
        """Refuse the call, because the function is not known."""
        raise PlannerError(
            f"this plan was read from JSON, which holds the name of {self.name!r} only: plan anew with the function"
        )

    def __repr__(self) -> str:
        return f"<{self.name}, not in JSON>"


@dataclasses.dataclass(frozen=True, slots=True)
class _StoredLoop:
    """A loop as versions before 2026-11-24 stored it: a part of a plan whose programs had one step each."""

    axes: tuple[tuple[str, int], ...]
    body: PlanRecord


# The names in the JSON never change, even if a class is renamed.
_CLASSES = {
    "Choice": PricedImplementation,
    "Contraction": Contraction,
    "Cost": Cost,
    "Device": Device,
    "Forgotten": Forgotten,
    "Gather": Gather,
    "Layout": Layout,
    "Leaf": Leaf,
    "Loop": _StoredLoop,
    "Node": Node,
    "OnMesh": OnMesh,
    "Operand": Operand,
    "Options": Options,
    "Plan": PlanRecord,
    "PlanCost": PlanCost,
    "Program": Program,
    "Programs": Programs,
    "Resolved": Resolved,
    "Spec": Spec,
    "Step": Step,
    "StepCost": StepCost,
    "Variable": Variable,
}
# Fields that plans stored before lack: they are written only where they differ from their defaults.
_NEWER: tuple[tuple[type, str, Any], ...] = (
    (Options, "deadline", None),
    (PlanCost, "bound", None),
    (Contraction, "mesh", None),
    (Programs, "copies", None),
    (Programs, "by_autograd", False),
    (Device, "link_bandwidth", math.inf),
    (Device, "link_seconds", 0.0),
    (Device, "products", ()),
    (Device, "loop_seconds", 3e-8),
    (Device, "outer_cache_bytes", 0),
    (Device, "outer_cache_bandwidth", math.inf),
)
_NAMES = {kind: name for name, kind in _CLASSES.items()}


def plan_to_json(plan: PlanRecord) -> str:
    """Return a plan as JSON."""
    return json.dumps(encode(plan), indent=1, allow_nan=False)


def plan_from_json(text: str) -> PlanRecord:
    """Read what `plan_to_json` wrote.

    Raises:
        PlannerError: the text is not such a plan.
    """

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        return _checked_plan(decode(json.loads(text, parse_constant=refuse)))
    except PlannerError:
        raise
    except _DAMAGE as error:
        raise PlannerError(f"this is not a plan written by to_json: {error}") from None


# What reading a text that is no plan may raise.
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError)
# The names that strings in these fields may be.
_KNOWN: dict[str, Collection[str | None]] = {
    "dtype": ITEMSIZES,
    "source_dtype": (*ITEMSIZES, None),
    "index_mode": MODES,  # also those that only planner itself asks for
    "backend": BACKENDS,
    "precision": (*PRECISIONS, None),
}


def _checked_plan(plan: object) -> PlanRecord:
    """Return a plan; refuse what is not one, and a plan whose parts do not fit together."""
    if not isinstance(plan, PlanRecord):
        raise PlannerError(f"this is not a plan written by to_json, but a {type(plan).__name__}")
    try:
        misfit = _misfit(plan)
    except _DAMAGE as error:
        misfit = repr(error)
    if misfit:
        raise PlannerError(f"this is not a plan written by to_json: {misfit:.200}")
    return plan


def _misfit(plan: PlanRecord) -> str:
    """Return which parts of a plan do not fit together; "" if all do."""
    options, programs, spec = plan.options, plan.programs, plan.resolved.spec
    if not (isinstance(options.minimize, Forgotten) or options.minimize in OBJECTIVES):
        return "'minimize' is damaged"
    if not isinstance(options.optimize, str | tuple | Forgotten):
        return "'optimize' is damaged"
    values, count = dict(enumerate(programs.variables)), len(plan.operands)
    if not all(_lies(value.layout, value.shape) for value in programs.variables):
        return "a value lies in memory along dimensions that it lacks"
    operands = [values[number].shape for number in range(count)]
    if operands != [spec.shape(term) for term in spec.inputs] or values[programs.result].shape != spec.output_shape:
        return "its operands and result are not those of its spec"
    as_given = [math.prod(shape) for shape in plan.resolved.shapes]  # with dimensions of size 1
    if as_given != [math.prod(shape) for shape in operands] or programs.forward.results != (programs.result,):
        return "its operands and result are not those of its spec"
    arrays = {gather.array for gather in spec.gathers}
    if not arrays == {*dict(plan.index_shapes)} == {*dict(plan.resolved.index_shapes)}:
        return "its index arrays are not those of its spec"
    gradients = [(number, operand) for number, operand in enumerate(programs.gradients) if operand is not None]
    if len(programs.gradients) != count or any(values[g].shape != operands[n] for n, g in gradients):
        return "its gradients are not those of its operands"
    for program in filter(None, (programs.forward, programs.backward)):
        for step in program.steps:
            made = [values[number] for number in step.outputs]
            if not all(map(_lies, step.op.layouts, step.op.input_shapes)):
                return f"the step {step.op.spec} reads values that lie along dimensions that they lack"
            if tuple(values[number].shape for number in step.inputs) != step.op.input_shapes:
                return f"the step {step.op.spec} reads values of other shapes"
            if tuple(x.shape for x in made) != step.op.output_shapes or {x.dtype for x in made} - {
                *step.op.output_dtypes
            }:
                return f"the step {step.op.spec} makes values of other shapes or dtypes"
    nodes = list(nodes_of(plan.tree))
    for node in nodes:
        read = [values[x.operand].shape if isinstance(x, Leaf) else x.op.output_shapes[0] for x in node.children]
        if tuple(read) != node.op.input_shapes:
            return f"the step {node.op.spec} of its tree reads values of other shapes"
    # Guards that show in gradients only are in no forward program. Programs know how values lie in memory.
    ops = [[node.op for node in nodes], [step.op for step in programs.forward.steps]]
    in_tree, in_program = ({op.with_layouts(()) for op in some if not isinstance(op, Guard)} for some in ops)
    return "" if in_tree == in_program else "its tree has other steps than its program"


def _lies(layout: Layout | None, shape: tuple[int, ...]) -> bool:
    """Whether a value of this shape can lie in memory so."""
    if layout is None:
        return True
    dims = [dim for run in layout.runs for dim in run]
    return sorted(dims) == [dim for dim, n in enumerate(shape) if n != 1] and {*layout.repeated} <= {*dims}


def _with_guards(plan: PlanRecord) -> PlanRecord:
    """Return a plan with its guards: versions before 2026-11-24 stored programs without them."""
    gradients = plan.contraction.may_be_differentiated
    guarded = add_guards(plan.tree, plan.resolved.spec, plan.index_mode, gradients)
    if guarded == plan.tree or plan.programs.has_guards:
        return plan
    stored = {step.op: step.choice for step in plan.steps}
    # All steps but guards are stored, or are not wanted: both gradients in one step.
    table = load_backend(plan.backend).table
    lower = Lowerer(
        lambda op: table.choices(op, plan.device) if isinstance(op, Guard) else (), step_key("time"), stored
    )
    rebuilt = _rebuilt(plan, lower)
    # Guards that show in gradients only may be in no program.
    return rebuilt if rebuilt.programs.has_guards else plan


def _with_loop(plan: PlanRecord, stored: _StoredLoop) -> PlanRecord:
    """Return a plan with its loop as a step: versions before 2026-11-24 stored the loop beside the tree of a slice."""
    body, costs = stored.body, [step.choice.cost for step in plan.steps]
    loop = loop_over(plan.contraction, stored.axes, body.tree, body.device, body.options.minimize)
    loop = dataclasses.replace(loop, bodies=(body, *loop.bodies[1:]))
    lower = Lowerer(lambda op: [PricedImplementation(LOOP, costs[op.first_operand])], step_key("time"))
    return _rebuilt(dataclasses.replace(plan, tree=loop_node(loop)), lower)


def _rebuilt(plan: PlanRecord, lower: Lowerer) -> PlanRecord:
    """Return a plan with the programs of its tree."""
    variables = plan.programs.variables[: len(plan.operands)]
    programs = build(plan.tree, plan, variables, lower, in_loop=plan.origin == "slice")
    return dataclasses.replace(plan, programs=programs)


def encode(value: Any) -> Any:
    """Turn a plan, or a part of one, into the types that JSON has."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PlannerError(f"{value} cannot be written as JSON")
        return value
    if isinstance(value, Op):
        names = ["spec", "dtype", "source_dtype", "pair", "layouts"]
        if isinstance(value, Cast) and value.fused:
            names += ["fused"]
        if isinstance(value, Guard):
            names += ["dropped", "rows", "only_gradients"]
        fields = {name: getattr(value, name) for name in names}
        if isinstance(value, Loop):
            fields |= {"axes": value.axes, "bodies": value.bodies, "gradient": isinstance(value, LoopGradient)}
        return {"type": "Op", **{key: encode(entry) for key, entry in fields.items()}}
    if isinstance(value, Node) and tree_depth(value) > MOST_DEPTH:
        return {"type": "Tree", "nodes": encode(flatten(value))}
    name = "Plan" if isinstance(value, PlanRecord) else _NAMES.get(type(value))
    if name is not None:
        if isinstance(value, StepCost):
            return {"type": name, **value._asdict()}
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        for kind, newer, default in _NEWER:
            if isinstance(value, kind) and fields[newer] == default:
                del fields[newer]
        if isinstance(value, PlanRecord):
            del fields["known_naive_cost"]
            if not value.symbols:  # plans stored before lack it
                del fields["symbols"]
            fields["naive_cost"] = value.naive_cost
        if isinstance(value, Device):  # JSON has no infinity, and no rate is None
            fields = {key: None if entry == math.inf else entry for key, entry in fields.items()}
        version = {"version": VERSION} if isinstance(value, PlanRecord) else {}
        return {"type": name, **version, **{key: encode(entry) for key, entry in fields.items()}}
    if isinstance(value, (tuple, list)):
        return [encode(entry) for entry in value]
    if callable(value):
        return encode(Forgotten(str(getattr(value, "__name__", type(value).__name__))))
    raise PlannerError(f"a {type(value).__name__} cannot be written as JSON")


def decode(value: Any) -> Any:
    """Turn the output of `encode` back into objects."""
    if isinstance(value, list):
        return tuple(decode(entry) for entry in value)
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("type")
    if name == "Plan" and fields.pop("version") != VERSION:
        raise PlannerError(f"this plan was written by another version: only {VERSION} can be read")
    if name == "Device":
        fields = {key: math.inf if entry is None else entry for key, entry in fields.items()}
    parts = {key: decode(entry) for key, entry in fields.items()}
    if name == "Plan":
        return _decode_plan(**parts)
    if name == "Tree":
        tree = unflatten(**parts)
        for node in nodes_of(tree):
            _checked(node)
        return tree
    return _checked(_decode_op(**parts) if name == "Op" else _CLASSES[name](**parts))


def _checked(part: Any) -> Any:
    """Return a part of a plan; refuse it if one of its fields is not of the type that its class says."""
    for field, fits in _field_checks(part.__class__):
        value = getattr(part, field)
        if not fits(value) or (field in _KNOWN and value not in _KNOWN[field]):
            name = field.removeprefix("known_")
            raise PlannerError(f"this is not a plan written by to_json: {name!r} is damaged: it is {value!r:.80}")
    return part


@functools.cache
def _field_checks(kind: type) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
    """Return the fields of a class, each with a function that tells whether a value is of the field's type."""
    return tuple((name, _check_of(hint)) for name, hint in get_type_hints(kind).items())


@functools.cache
def _check_of(hint: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether a value is of a type: a class, a union or a tuple."""
    if hint is Any:
        return lambda value: True
    if get_origin(hint) in (Union, UnionType):
        options = [_check_of(option) for option in get_args(hint)]
        return lambda value: any(fits(value) for fits in options)
    if get_origin(hint) is tuple:
        *kinds, last = get_args(hint)
        if last is Ellipsis:
            (each,) = map(_check_of, kinds)
            return lambda value: isinstance(value, tuple) and all(map(each, value))
        places = list(map(_check_of, (*kinds, last)))
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(places)
            and all(fits(x) for fits, x in zip(places, value, strict=True))
        )
    if hint in (int, float):
        numbers = (int,) if hint is int else (int, float)
        return lambda value: type(value) in numbers  # true and false are numbers too, elsewhere
    return lambda value: isinstance(value, hint)


def _decode_plan(naive_cost: PlanCost, loop: _StoredLoop | None = None, **parts: Any) -> PlanRecord:
    plan: PlanRecord = _checked(PlanRecord(known_naive_cost=naive_cost, **parts))
    return _checked_plan(_with_guards(plan) if loop is None else _with_loop(plan, loop))


def _decode_op(
    spec: Spec, dtype: str, source_dtype: str | None, pair: bool, layouts: tuple[Layout | None, ...], **more: Any
) -> Op:
    if not isinstance(pair, bool) or not isinstance(source_dtype, str | None):
        raise PlannerError("this is not a plan written by to_json: 'pair' or 'source_dtype' is damaged")
    if "bodies" in more:
        if not more["bodies"]:
            raise PlannerError("this is not a plan written by to_json: 'bodies' is damaged")
        return (LoopGradient if more.pop("gradient") else Loop)(spec, dtype, layouts, **more)
    if source_dtype is not None:
        return Cast(spec, dtype, layouts, source_dtype=source_dtype, **more)
    if more:
        return Guard(spec, dtype, layouts, **more)
    return (JointGradient if pair else Einsum)(spec, dtype, layouts)
