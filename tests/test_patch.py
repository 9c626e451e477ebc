"""`planner.patch()`: the einsum of a framework is planner's within a `with`, and its own again afterwards."""

from __future__ import annotations

import _thread
import threading
import types

import numpy as np
import pytest

import planner

A, B = np.arange(6.0, dtype="f4").reshape(2, 3), np.arange(12.0, dtype="f4").reshape(3, 4)


@pytest.fixture(params=["numpy", "torch", "jax"])
def lib(request):
    """A framework by name, with the module that has einsum and the function that makes arrays."""
    module = pytest.importorskip(
        {"jax": "jax.numpy"}.get(request.param, request.param), reason=f"{request.param} is not installed"
    )
    return types.SimpleNamespace(name=request.param, module=module, array=module.asarray)


def test_calls_are_routed_however_einsum_was_imported(lib):
    a, b = lib.array(A), lib.array(B)
    # As `from ... import` and a default argument bind it.
    imported = types.SimpleNamespace(einsum=lib.module.einsum)

    def default(*operands, einsum=lib.module.einsum):
        return einsum(*operands)

    with planner.patch(lib.name) as report:
        late = types.SimpleNamespace(einsum=lib.module.einsum)
        for einsum in (lib.module.einsum, imported.einsum, late.einsum, default):
            assert np.array_equal(einsum("ij,jk->ik", a, b), A @ B)
        assert np.array_equal(late.einsum(a, [0, 1], b, [1, 2]), A @ B)
    assert not report.passed_on
    for einsum in (lib.module.einsum, imported.einsum, late.einsum, default):
        assert np.array_equal(einsum("ij,jk->ik", a, b), A @ B)
    assert report.routed == 5


def test_what_planner_refuses_runs_as_it_was_meant():
    objects = np.array([1, 2, 3], dtype=object)
    with planner.patch("numpy") as report:
        assert np.einsum("i->", objects) == 6
        with pytest.raises(ValueError, match="subscript"):
            np.einsum("ij->", objects)  # NumPy's own words
        assert np.einsum("ij->", A) == 15
    assert report.routed == 1
    assert report.passed_on.total() == 2
    assert str(report).startswith("1 call routed, 2 passed on\n  2: operand 0: dtype 'object' is not supported")


def test_errors_of_specs_with_brackets_are_ours(torch):
    with planner.patch("torch"), pytest.raises(planner.PlannerError, match="index array"):
        torch.einsum("q[n]j->nj", torch.ones(2, 3))


def test_everything_is_undone_after_an_error(lib):
    code = getattr(lib.module.einsum, "__code__", None)
    with pytest.raises(ZeroDivisionError), planner.patch() as report:
        1 / 0  # noqa: B018
    lib.module.einsum("ij->ji", lib.array(A))
    assert report.routed == 0
    assert getattr(lib.module.einsum, "__code__", None) == code
    with planner.patch() as report:
        lib.module.einsum("ij->ji", lib.array(A))
    assert report.routed == 1


def test_patches_nest(lib):
    a = lib.array(A)
    with planner.patch(lib.name) as outer:
        lib.module.einsum("ij->ji", a)
        with planner.patch(lib.name) as inner:
            lib.module.einsum("ij->ji", a)
        lib.module.einsum("ij->ji", a)
    lib.module.einsum("ij->ji", a)
    assert (outer.routed, inner.routed) == (2, 1)


def test_other_threads_keep_their_own(lib):
    reports, barrier = {}, threading.Barrier(3)

    def work(name):
        barrier.wait()
        if name == "plain":
            lib.module.einsum("ij->ji", lib.array(A))
        else:
            with planner.patch(lib.name) as report:
                for _ in range(3):
                    lib.module.einsum("ij->ji", lib.array(A))
            reports[name] = report.routed
        barrier.wait()

    with planner.patch(lib.name) as mine:
        threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two", "plain")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert mine.routed == 0
    assert reports == {"one": 3, "two": 3}


def in_a_foreign_thread(work):
    """Run a function in a thread that Python does not know of, as those of autograd are, and raise its error."""
    errors, done = [], threading.Event()

    def run():
        try:
            work()
        except Exception as error:
            errors.append(error)
        done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(60)
    for error in errors:
        raise error


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_again_in_a_thread_of_autograd(torch, reentrant):
    a = torch.ones(3, 4, requires_grad=True)

    def total():
        return torch.utils.checkpoint.checkpoint(
            lambda a: torch.einsum("ij,kj->ik", a * 2, a).abs(), a, use_reentrant=reentrant
        ).sum()

    def patched():
        with planner.patch("torch") as report:
            torch.einsum("ij,kj->ik", a, a)
        assert report.routed == 1

    total().backward()
    expected, a.grad = a.grad, None
    with planner.patch("torch") as report:
        loss = total()
        in_a_foreign_thread(loss.backward)
        assert report.routed == 2
        assert torch.equal(a.grad, expected)
        loss = total()

        def patched_before():
            patched()
            loss.backward()
            patched()

        in_a_foreign_thread(patched_before)  # a patch of its own leaves nothing behind
        assert report.routed == 4
        assert torch.equal(a.grad, 2 * expected)
    assert torch.functional.einsum.__code__.co_name == "einsum"


def test_a_thread_of_the_programs_own_is_not_routed(torch):
    a, reports = torch.ones(3, 4, requires_grad=True), []
    with planner.patch("torch") as report:
        loss = torch.einsum("ij,kj->ik", a, a).sum()
        loss.register_hook(lambda _: reports.append(torch.einsum("ij->ji", a.detach())))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert (len(reports), report.routed) == (1, 1)


def test_the_librarys_own_calls_are_not_routed(jax):
    """A sum over a boolean axis of size 0 is `jnp.einsum` inside; XLA may lower it within another patch."""
    import jax.numpy as jnp

    empty = jnp.ones((2, 0), bool), jnp.ones((0, 3), bool)
    with planner.patch("jax") as report:
        assert planner.contract("ij,jk->ik", *empty).shape == (2, 3)
        assert jax.jit(lambda a, b: planner.contract("ij,jk->ik", a, b))(*empty).shape == (2, 3)
    assert report.routed == 0
    assert not report.passed_on


def test_gradients_autograd_and_jit(torch, jax):
    a, b = torch.tensor(A, requires_grad=True), torch.tensor(B)
    with planner.patch() as report:
        torch.einsum("ij,jk->ik", [a, b]).sum().backward()
        import jax.numpy as jnp

        pulled = jax.jit(jax.grad(lambda x: jnp.einsum("ij,jk->ik", x, B).sum()))(A)
    assert report.routed == 2
    assert torch.equal(a.grad, torch.tensor(B).sum(1).expand(2, 3))
    assert np.array_equal(pulled, a.grad)


def test_under_torch_compile(torch):
    a, b, whole = torch.tensor(A), torch.tensor(B), torch.ones(2, 3, dtype=torch.int8)

    def call(x, y, z):  # one that another order of axes would suit, and a sum that torch widens
        return torch.einsum("ij,jk->ki", x, y) + 1, torch.einsum("ij->i", z)

    expected = call(a, b, whole)
    with planner.patch("torch"):
        torch._dynamo.reset()
        found = torch.compile(call, fullgraph=True, backend="eager")(a, b, whole)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_a_compiled_function_is_compiled_once_within_a_patch(torch):
    """A call counts when it is traced: the compiler must not guard the counts."""
    torch._dynamo.reset()
    compiled, results = torch.compile(lambda x: torch.einsum("ij,kj->ik", x, x), fullgraph=True, backend="eager"), []
    with planner.patch("torch") as report, torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            results.append(compiled(torch.tensor(A)))
            torch.einsum("ij->ji", torch.tensor(A))
    assert torch.equal(results[-1], torch.tensor(A @ A.T))
    assert report.routed >= 4
    assert not report.passed_on


def test_under_jit_trace(torch):
    """The trace serves other sizes."""
    with planner.patch("torch") as report:
        traced = torch.jit.trace(lambda x, y: torch.einsum("ij,jk->ki", x, y), (torch.ones(5, 7), torch.ones(7, 11)))
    assert report.routed > 0
    assert not report.passed_on
    assert torch.equal(traced(torch.tensor(A), torch.tensor(B)), torch.tensor(A @ B).T)


def test_refused_sublists_are_passed_on():
    with planner.patch("numpy") as report:
        assert np.einsum(np.array([1, 2], dtype=object), [0], []) == 3
    assert report.passed_on.total() == 1


def test_a_patch_within_a_routed_call():
    class Late:
        def __array__(self, dtype=None, copy=None):
            with planner.patch("numpy"):
                return np.einsum("ij->ji", A)

    with planner.patch("numpy") as report:
        np.testing.assert_array_equal(np.einsum("ij->ij", Late()), A.T)
    assert report.routed == 1


def test_what_overrides_functions_sees_a_call_of_torch_first(torch):
    """fx records `torch.einsum`. A mode, entered before the patch or within it, sees it, and its own call is routed."""
    names = []

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **(kwargs or {}))

    with planner.patch("torch") as report:
        traced = torch.fx.symbolic_trace(lambda x: torch.einsum("ij->ji", x))
    assert "einsum" in str(traced.graph)
    assert (report.routed, report.passed_on.total()) == (0, 0)
    x = torch.tensor(A)
    with planner.patch("torch") as report, Names():
        within = traced(x)
    with Names(), planner.patch("torch") as other:
        outside = traced(x)
    assert torch.equal(within, outside)
    assert torch.equal(within, torch.tensor(A.T.copy()))
    assert (report.routed, other.routed) == (1, 1)
    assert names == [torch.functional.einsum] * 2


def test_calls_of_other_functions_of_torch_are_left_alone(torch):
    with planner.patch("torch"):
        assert not torch.overrides.has_torch_function((torch.tensor(A),))


def test_a_compiled_function_is_routed_within_a_patch_alone(torch):
    """It is compiled twice, however often a patch is entered."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.einsum("ij,kj->ik", x, x), fullgraph=True, backend="aot_eager")
    x, counts = torch.tensor(A), []
    compiled(x)
    for _ in range(3):
        with planner.patch("torch") as report:
            assert torch.equal(compiled(x), torch.tensor(A @ A.T))
        counts.append(report.routed)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(compiled(x), torch.tensor(A @ A.T))
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


def test_unknown_frameworks_are_refused():
    with pytest.raises(planner.PlannerError, match="unknown"), planner.patch("tensorflow"):
        pass
