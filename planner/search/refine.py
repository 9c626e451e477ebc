"""Improves candidates in what their search did not decide: the order of children, and faster implementations."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from planner.cost.limits import Limits, keeps_within, within
from planner.cost.objective import plan_key, step_key
from planner.language.options import Options
from planner.program.build import Lowerer
from planner.program.contraction import Contraction
from planner.program.forms import product_form
from planner.program.frameworks import Backend, load_backend
from planner.program.ops import Einsum, JointGradient, Op, PricedImplementation
from planner.program.plan import PlanRecord
from planner.program.program import Programs
from planner.program.tree import Leaf, Node, Tree, change_tree, keep_nothing, merge_takes, nodes_of
from planner.search.space import PATH_STOP, Candidate, SearchSpace

# Each trial builds the programs anew, so the numbers of nodes and ops to try are limited.
MOST_NODES, MOST_STEPS, MOST_OPS = 12, 200, 24
# How many bytes a plan that autograd runs may allocate, and how many it may retain, if another takes less.
_MOST_ALLOCATED, _MOST_RETAINED = 2**22, 2**18
# The part of the time that the naive tree may take with index arrays if it needs more than that, because it retains the
# rows that it takes; and the most that it may retain then.
_WORTH_TAKEN, _MOST_TAKEN = 0.8, 2**20
# A long plan of at most so many operands is compared with the naive one, of which autograd would keep copies. It must
# take this part of the time, as short ones must, unless there are two operands: of more, products may be computed in
# another order than einsum's.
_MOST_OPERANDS, _WORTH_COPIES = 4, 0.9
# A plan without index arrays that runs as a Function must be predicted to be so many times as fast as the framework's
# own calls. Predictions are no more exact than that, and users who replace einsum must not lose.
_WORTH_A_FUNCTION = 1.2
# Another order of a value's axes is taken if the plan is then predicted to cost less than this part of what it did.
_WORTH_ORDER = 0.995


def quicken_steps(space: SearchSpace, candidate: Candidate) -> Candidate:
    """Replace implementations by faster ones, one step after the other, as long as the limits allow.

    A search for the least peak takes the leanest implementation of each step, even if the step or its program is far
    from the limit. The slowest steps are tried first.
    """
    options = space.options
    key = plan_key(options.minimize)
    if not within(candidate.cost, options):
        return candidate
    forward, backward = candidate.programs.forward, candidate.programs.backward
    ops = [step.op for step in sorted(candidate.programs.steps, key=lambda step: -step.choice.cost.picoseconds)]
    if backward:
        # Try one step for both gradients where there are two steps now.
        layouts = dict.fromkeys((variable.shape, variable.layout) for variable in candidate.programs.variables)
        for step in forward.steps:
            if len(step.inputs) == 2:
                shape = step.op.spec.output_shape
                ops += [step.op.joint_gradient(layout) for other, layout in layouts if other == shape]
    several = [op for op in dict.fromkeys(ops) if len(space.choices(op)) > 1 or isinstance(op, JointGradient)]
    for op in several[:MOST_OPS]:
        for choice in sorted(space.choices(op), key=lambda choice: choice.cost.picoseconds):
            lower = candidate.lower.fixing(op, choice)
            programs = space.programs(candidate.tree, lower)
            if within(programs.cost, options) and key(programs.cost) < key(candidate.cost):
                candidate = dataclasses.replace(candidate, programs=programs, lower=lower, proven=False)
                break
    return candidate


def order_values(space: SearchSpace, best: Candidate) -> Candidate:
    """Return the candidate with the axes of its values in the orders that are predicted to cost least.

    The search gives the axes of all values one order. A product copies no result that has its factors' order: the axes
    of both, then those of one, then those of the other. But the step that reads the result may copy it. If one of the
    two copies, both such orders are tried, and taken if the plan is predicted to cost less and needs no more memory.
    Ctrl-C and a deadline end that. For backends without strides see `in_cheaper_orders`.
    """
    key, count = plan_key(space.options.minimize), sum(1 for _ in nodes_of(best.tree))
    if space.options.minimize not in ("time", "bytes") or best.interrupted or best.loop is not None:
        return best
    if count > MOST_NODES:
        return best
    if not load_backend(space.backend).strided:
        return in_cheaper_orders(best, space, space.options) if space.options.minimize == "time" else best
    try:
        for _ in range(2):  # a value may gain once others have their orders
            before = best
            for number, turned in itertools.product(range(1, count), (False, True)):
                if not best.cost.copied_bytes or space.is_late():
                    return best
                tree = with_result_in_order(best.tree, number, turned)
                if not _saves_in_a_step(best, tree):
                    continue
                programs = space.programs(tree, best.lower)
                is_cheaper = key(programs.cost)[0] < _WORTH_ORDER * key(best.cost)[0]
                if is_cheaper and keeps_within(programs.cost, Limits(best.cost.peak_bytes, best.cost.retained_bytes)):
                    best = dataclasses.replace(best, tree=tree, programs=programs)
            if best is before:
                break
    except KeyboardInterrupt:
        return dataclasses.replace(best, interrupted=True)
    return best


def in_cheaper_orders(best: Candidate, space: SearchSpace, options: Options | None = None) -> Candidate:
    """Return the candidate with the axes of products without a sum in the orders that take the least time.

    Arrays of these backends lie row-major. So another order of axes is another array for the step that reads it. What
    `Backend.order_seconds` returns decides on orders only: it is part of no plan's predicted time. That time does not
    fall, so no plan takes less than a search has proven. Plans may need more memory than before, but retain no more.
    Ctrl-C and a deadline end the search for orders.

    Args:
        best: the candidate.
        space: its search space.
        options: whose limits the plan must keep; None if it may need any memory.
    """
    try:
        count = sum(1 for _ in nodes_of(best.tree))
        for number, turned in itertools.product(range(1, count), (False, True)):
            tree = with_result_in_order(best.tree, number, turned)
            op = next(itertools.islice(nodes_of(tree), number, None)).op
            if tree == best.tree or (form := product_form(op.spec)) is None or form.contracted:
                continue
            if space.is_late():
                break
            before, after = (_order_seconds(space.contraction, each) for each in (best.tree, tree))
            if after >= before:
                continue
            programs = space.programs(tree, best.lower)
            is_faster = best.cost.seconds <= programs.cost.seconds < best.cost.seconds + before - after
            fits = options is None or within(programs.cost, options)
            if is_faster and fits and programs.cost.retained_bytes <= best.cost.retained_bytes:
                best = dataclasses.replace(best, tree=tree, programs=programs)
    except KeyboardInterrupt:
        return dataclasses.replace(best, interrupted=True)
    return best


def _order_seconds(contraction: Contraction, tree: Tree) -> float:
    """Return how much longer a tree's steps take because of the orders of axes between them, beyond their prices."""
    seconds = load_backend(contraction.backend).order_seconds
    if seconds is None:
        return 0.0
    pairs = [(child.op, node.op) for node in nodes_of(tree) for child in node.children if isinstance(child, Node)]
    return sum(seconds(op, reader, contraction.device) for op, reader in pairs)


def _saves_in_a_step(best: Candidate, tree: Tree) -> bool:
    """Whether one of the forward steps that a tree changes copies now, and whether these steps cost less in the tree.

    Values whose order the tree changes count as row-major.
    """
    steps = {step.op.spec: step for step in best.programs.forward.steps}
    pairs = zip(nodes_of(best.tree), nodes_of(tree), strict=True)
    changed = [(steps[a.op.spec], b.op) for a, b in pairs if a.op.spec != b.op.spec and a.op.spec in steps]
    if not any(step.choice.cost.copied_bytes for step, _ in changed):
        return False
    key, saved = best.lower.key, 0
    for step, op in changed:
        old, layouts = step.op.spec.inputs, step.op.layouts or (None,) * len(step.inputs)
        lie = [layout if term == new else None for term, new, layout in zip(old, op.spec.inputs, layouts, strict=True)]
        saved += key(step.choice.cost)[0] - key(best.lower(op.with_layouts(lie)).cost)[0]
    return saved > 0


def with_result_in_order(tree: Tree, number: int, turned: bool) -> Tree:
    """Return a tree in which the result of a step, if it is a product, has the order of its factors.

    Args:
        tree: the tree.
        number: the number of the step, as `nodes_of` counts.
        turned: whether the axes of the second factor alone come before those of the first.
    """
    product = next(itertools.islice(nodes_of(tree), number, None))
    op = product.op
    form = product_form(op.spec) if isinstance(op, Einsum) else None
    if form is None:
        return tree
    groups = (form.batch, form.right, form.left) if turned else (form.batch, form.left, form.right)
    old, new = op.spec.output, tuple(itertools.chain(*groups))
    if new == old:
        return tree
    dims = [old.index(axis) for axis in new]

    def change(node: Node, children: tuple[Tree, ...]) -> Tree:
        op = node.op
        if node is product:
            op = dataclasses.replace(op, spec=dataclasses.replace(op.spec, output=new))
        elif any(child is product for child in node.children):
            terms = [
                tuple([term[dim] for dim in dims]) if child is product else term
                for child, term in zip(node.children, op.spec.inputs, strict=True)
            ]
            op = dataclasses.replace(op, spec=dataclasses.replace(op.spec, inputs=tuple(terms)))
        return dataclasses.replace(node, op=op, children=children)

    return change_tree(tree, change)


def order_children(space: SearchSpace, best: Candidate) -> Candidate:
    """Return the candidate with children in the order of least memory, unless the search chose the order."""
    if space.options.minimize == "peak" or sum(1 for _ in nodes_of(best.tree)) > MOST_STEPS:
        return best
    nodes = _binary_nodes(best.tree)
    if len(nodes) > MOST_NODES:
        return best
    for path in nodes:
        for field in ("order", "backward_order") if best.programs.backward else ("order",):
            tree = _flip_order(best.tree, path, field)
            programs = space.programs(tree, best.lower)
            if programs.cost.peak_bytes < best.cost.peak_bytes:
                best = dataclasses.replace(best, tree=tree, programs=programs)
    return best


def prefer_autograd(space: SearchSpace, best: Candidate, most: Limits | None = None) -> Candidate:
    """Return the candidate, or one that the framework's own autograd runs if that takes no longer, or little longer.

    Small plans may take less time than what a call takes beside its steps. The other candidates are the same tree and
    the naive one, with the steps that autograd runs. They take no more memory, or little; but the naive tree, which is
    the framework's own einsum, may take what that takes if it saves a tenth of the time; with index arrays a fifth, and
    it may retain `_MOST_TAKEN` bytes. If it differs from the candidate only in that rows are taken before the step that
    multiplies them, its steps are thought to take no longer, and any time that it saves is enough. In place of a
    long plan comes only the naive one, and only if autograd keeps copies of operands, no more than behind einsum; of
    two operands if it saves any time.

    Args:
        space: the search space.
        best: the candidate. If autograd runs it, it is returned; so is a long one with index arrays or many operands.
        most: what a plan that autograd runs may need, but for the naive one; None: as much as the candidate, or little.
    """
    options, backend, back = space.options, load_backend(space.backend), best.programs.backward
    free = not options.limited and options.minimize == "time"
    if back is None or backend.call_seconds is None or not free or options.optimize != "auto":
        return best
    beside, gathers = backend.call_seconds(space.contraction, best.tree, best.programs), space.resolved.spec.gathers
    is_long, least = beside is None, best.cost.seconds + (beside or 0.0)
    if beside == 0 or (is_long and (gathers or len(space.operands) > _MOST_OPERANDS or best.programs.by_autograd)):
        return best
    rows = backend.autograd_rows or {}

    def lowerer(among: frozenset[str]) -> Lowerer:
        def choices(op: Op) -> Sequence[PricedImplementation]:
            return space.choices(op, among=among) or space.choices(op)

        return Lowerer(choices, step_key("time"), plain=rows, records=True)

    # If autograd cannot run the fastest rows, others are tried, without `matmul`.
    every = frozenset(rows)
    lowerers = [(allowed, lowerer(allowed)) for allowed in (every, every - {"matmul"})]
    naive, _ = space.search("flops", PATH_STOP, space.path("auto"), naive=True)
    most = most or Limits(max(best.cost.peak_bytes, _MOST_ALLOCATED), max(best.cost.retained_bytes, _MOST_RETAINED))
    native, shortest = best, math.inf
    is_stock = all(space.table.rows[step.choice.lowering].stock for step in best.programs.steps)
    for tree in dict.fromkeys((best.tree, *((naive.tree,) if naive else ()))):
        is_einsum = naive is not None and tree == naive.tree
        for allowed, lower in lowerers:
            if not all(space.choices(node.op, among=allowed) for node in nodes_of(tree)):
                break  # autograd does not run such a step
            found = Candidate(space.programs(tree, lower), tree, lower, False, f"{best.origin}, by autograd")
            # The same products, of rows that are taken before. Prices of the two rows differ.
            takes_first = is_stock and tree != best.tree and merge_takes(tree) == best.tree
            seconds = min(found.cost.seconds, best.cost.seconds) if takes_first else found.cost.seconds
            part = 0.0  # it may take this part of the least time
            if keeps_within(found.cost, most):
                part = 1.0 if gathers else _WORTH_A_FUNCTION
            elif is_einsum and not gathers:
                part = _WORTH_COPIES
            elif is_einsum and found.cost.retained_bytes <= _MOST_TAKEN:
                part = 1.0 if takes_first else _WORTH_TAKEN
            if is_long:  # the overhead of a Function does not count, but copies that autograd keeps do
                copies = is_einsum and _copies_as_einsum(found.programs, backend)
                part = 0.0 if not copies else 1.0 if len(space.operands) == 2 else _WORTH_COPIES
            if seconds >= part * least:
                break
            if call_seconds(space.contraction, found) == found.cost.seconds:
                if seconds < shortest:
                    native, shortest = found, seconds
                break
    return native


def _copies_as_einsum(programs: Programs, backend: Backend) -> bool:
    """Whether autograd keeps copies of a plan's operands, and no more bytes of them than behind einsum."""
    if programs.copies is None or backend.einsum_copies is None:
        return False
    steps = [step for step in programs.forward.steps if len(step.inputs) == 2]
    return programs.copies <= sum(sum(backend.einsum_copies(step.op)) for step in steps)


def call_seconds(contraction: Contraction, found: Candidate | PlanRecord) -> float:
    """Return what a call of a candidate or plan takes: its steps, and what the framework takes beside them."""
    beside = load_backend(contraction.backend).call_seconds
    if beside is None or found.programs.backward is None:
        return found.cost.seconds
    return found.cost.seconds + (beside(contraction, found.tree, found.programs) or 0.0)


def keep_inputs(space: SearchSpace, candidate: Candidate) -> Candidate:
    """Return the candidate's tree with nothing kept but the inputs."""
    tree, lower = keep_nothing(candidate.tree), candidate.lower
    return Candidate(space.programs(tree, lower), tree, lower, False, candidate.origin)


def with_row_major_results(space: SearchSpace, best: Candidate) -> Iterator[Candidate]:
    """Yield the candidate's tree with row-major results where a row leaves them, as the search took them to be."""

    def choices(op: Op) -> Sequence[PricedImplementation]:
        found = space.choices(op)
        return [choice for choice in found if not any(choice.layouts)] or found

    lower = Lowerer(choices, step_key("time"), plain=space.table.plain)
    yield Candidate(space.programs(best.tree, lower), best.tree, lower, False, best.origin)


def is_fastest_kept(space: SearchSpace, candidate: Candidate) -> bool:
    """Whether only the time counts, and the candidate's tree takes longer if fewer values are kept, or has none."""
    options, kept = space.options, set(candidate.programs.kept)
    if options.minimize != "time" or options.limited:
        return False
    steps = candidate.programs.forward.steps
    return not kept or any([step.choice.cost.picoseconds and not kept.isdisjoint(step.outputs) for step in steps])


def _binary_nodes(tree: Tree, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Return the nodes whose two children are steps, each as the numbers of the children on the path to it."""
    if isinstance(tree, Leaf):
        return []
    nodes = [path] if sum(isinstance(child, Node) for child in tree.children) == 2 else []
    for number, child in enumerate(tree.children):
        nodes += _binary_nodes(child, (*path, number))
    return nodes


def _flip_order(tree: Tree, path: tuple[int, ...], field: str) -> Tree:
    assert isinstance(tree, Node)
    if not path:
        if field == "order":
            return dataclasses.replace(tree, order=tree.order[::-1])
        return dataclasses.replace(tree, backward_order=tree.backward_order[::-1])
    children = list(tree.children)
    children[path[0]] = _flip_order(children[path[0]], path[1:], field)
    return dataclasses.replace(tree, children=tuple(children))
