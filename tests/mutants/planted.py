"""Thirty plausible bugs, each written as a change of one place, and the test that is to see it.

The text of a row occurs exactly once in its file: one that is gone is an error, here and in `test_planted.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib

from tests.mutants.judge import ROOT


@dataclasses.dataclass(frozen=True)
class Planted:
    """One bug.

    Attributes:
        bug: what was done wrong.
        file: the file.
        old: what stands there, exactly once.
        new: what stands there instead.
        test: what sees it, the quickest that should.
    """

    bug: str
    file: str
    old: str
    new: str
    test: str

    @property
    def name(self) -> str:
        """The bug, and a hash of the change: a changed row is judged anew."""
        return f"planted: {self.bug}, {self.file} {hashlib.sha256((self.old + self.new).encode()).hexdigest()[:6]}"

    def apply(self) -> str:
        """The file's text with the bug.

        Raises:
            ValueError: the row no longer fits the file.
        """
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.bug}: {self.old!r} occurs {text.count(self.old)} times in {self.file}, not once")
        return text.replace(self.old, self.new)


PLANTED = (
    Planted("a negative index is clipped, not wrapped (NumPy)", "backends/common/indices.py",
            "np.remainder(values, max(size, 1))", "np.clip(values, 0, size)",
            "tests/test_laws.py::test_the_width_of_an_index_never_matters[numpy]"),
    Planted("a negative index is clipped, not wrapped (torch)", "backends/torch/index.py",
            "(values.remainder_ if _in_place(owned) else values.remainder)(max(size, 1))", "values.clamp(0, size)",
            "tests/test_laws.py::test_the_width_of_an_index_never_matters[torch]"),
    Planted("a negative index is clipped, not wrapped (JAX)", "backends/jax/index.py",
            "lax.select(values < 0, values + size, values)", "jnp.where(values < 0, 0, values)",
            "tests/test_laws.py::test_the_width_of_an_index_never_matters[jax]"),
    Planted("a uint64 index is narrowed before it is clipped", "backends/common/indices.py",
            "(np.minimum(raw, limit) if raw.dtype == np.uint64 else raw).astype", "raw.astype",
            "tests/test_laws.py::test_a_uint64_beyond_int64_is_out_of_range[numpy]"),
    Planted("int32 offsets in a kernel: a position is not widened", "kernels/tiled_product/triton_product.py",
            "return index.to(INDEX)", "return index.to(tl.int32)",
            "tests/kernels/test_offsets.py::test_positions_have_64_bits"),
    Planted("int16 sort keys hold no number of groups of 2^15: off by one", "kernels/grouping/torch_grouping.py",
            "torch.int16 if size < 2**15", "torch.int16 if size <= 2**15",
            "tests/kernels/test_grouped.py::test_a_dropped_row_comes_last_where_its_key_is_the_widest"),
    Planted("a packed key of 33 bits", "kernels/grouping/jax_grouping.py",
            "<= UINT32_BITS\n", "<= UINT32_BITS + 1\n",
            "tests/kernels/test_jax_grouped.py::test_a_key_is_packed_while_it_fits_32_bits"),
    Planted("a missing mask: dropped rows of b are read in sums over groups", "kernels/tiled_product/triton_product.py",
            "there = there & (a_row >= 0) & (b_row >= 0)", "there = there & (a_row >= 0)",
            "tests/kernels/test_pooled.py::test_kernels_equal_a_loop_over_keys[Triton]"),
    Planted("a missing mask: an index that means no row still reads one", "backends/common/stock.py",
            "return ops.select(_with_dims(in_range, len(other_dims)), rows, 0) if may_drop else rows", "return rows",
            "tests/test_derive.py::test_transpose_is_the_oracles_gradient"),
    Planted("duplicates are dropped in a scatter (NumPy)", "backends/numpy/backend.py",
            "np.add.at(out, tuple(index), values.astype(out.dtype, copy=False))",
            "out[tuple(index)] += values.astype(out.dtype, copy=False)",
            "tests/test_laws.py::test_the_width_of_an_index_never_matters[numpy]"),
    Planted("duplicates are dropped in a scatter (JAX)", "backends/jax/ops.py",
            "out = lax.scatter_add(out, ", "out = lax.scatter(out, ",
            "tests/test_laws.py::test_the_width_of_an_index_never_matters[jax]"),
    Planted("duplicate keys are dropped from a pool's gradient (JAX)", "kernels/gathered_dot/jax_pooled.py",
            'start.at[entries, rows].add(terms, mode="drop")', 'start.at[entries, rows].set(terms, mode="drop")',
            "tests/kernels/test_pooled.py::test_kernels_equal_a_loop_over_keys[JAX, gathered]"),
    Planted("swapped axes: a batch axis goes last in the brackets", "planner/language/derive.py",
            "axes=(axis, *e.axes)", "axes=(*e.axes, axis)",
            "tests/test_derive.py::test_batched_is_a_loop"),
    Planted("swapped axes of a matrix", "backends/common/stock.py",
            "(*form.batch, *form.contracted, *right), (*lead, k, n)",
            "(*form.batch, *right, *form.contracted), (*lead, k, n)",
            "tests/test_laws.py::test_rows_that_no_index_names_never_matter[numpy]"),
    Planted("gradients that are not conjugated", "backends/torch/executable.py",
            "            gradient = gradient.conj()\n", "            gradient = gradient.conj().conj()\n",
            "tests/test_laws_torch.py::test_second_derivatives_of_complex_operands"),
    Planted("a wrong conjugate in a second derivative", "backends/torch/autograd.py",
            "others = [x.conj() for x in factors]", "others = list(factors)",
            "tests/test_laws_torch.py::test_second_derivatives_of_complex_operands"),
    Planted("a broadcast of size 1 against 0 gives 1", "planner/language/resolve.py",
            "            if known == 1:\n", "            if known == 1 and size > 0:\n",
            "tests/test_resolve.py::test_what_specs_resolve_to"),
    Planted("a stale cache key: torch's strides are not in it", "backends/torch/backend.py",
            "key.append((x.shape, x.stride(), x.dtype,", "key.append((x.shape, x.dtype,",
            "tests/test_signatures.py::test_calls_that_differ_have_signatures_that_differ[torch]"),
    Planted("a stale cache key: an index array's dtype is not in it", "planner/program/frameworks.py",
            "key += (name, type(q), q.shape, q.dtype)", "key += (name, type(q), q.shape)",
            "tests/test_signatures.py::test_calls_that_differ_have_signatures_that_differ[numpy]"),
    Planted("a stale entry: a measurement of another key is taken", "planner/cost/store.py",
            'if entry["format"] != FORMAT or entry["key"] != json.loads(_text(key)):', 'if entry["format"] != FORMAT:',
            "tests/test_optimize_measure.py::test_other_keys_formats_and_offers_are_no_entries"),
    Planted("a lost gradient flag in the cache key", "backends/torch/backend.py",
            "x.device, x.layout, x.requires_grad))", "x.device, x.layout))",
            "tests/test_signatures.py::test_calls_that_differ_have_signatures_that_differ[torch]"),
    Planted("a lost gradient: the last of several terms is kept, not their sum", "backends/torch/autograd.py",
            "to_operands[slot] = part if total is None else total + part", "to_operands[slot] = part",
            "tests/test_laws_torch.py::test_second_derivatives_of_complex_operands"),
    Planted("off by one at a tile's edge: the row behind a group is in it (Pallas)",
            "kernels/grouped_matmul/pallas_tiles.py",
            "(position < tiles.stop[:, None]", "(position <= tiles.stop[:, None]",
            "tests/kernels/test_pallas.py::test_tiles_hold_each_row_once_and_are_as_many_as_foretold"),
    Planted("off by one at a tile's edge: the row behind a piece is summed (Triton)",
            "kernels/segment_sum/triton_sum.py",
            "there = row < end\n", "there = row <= end\n",
            "tests/kernels/test_triton.py::test_rows_are_summed_by_group"),
    Planted("the last, shorter slice of a loop is not counted", "planner/program/loops.py",
            "[(axis, rest, 1)] * (rest > 0)", "[(axis, rest, 1)] * (rest > size)",
            "tests/test_loops.py::test_the_steps_of_a_shorter_last_slice_are_its_own"),
    Planted("slices are added up in a half type (NumPy, torch)", "backends/common/run.py",
            "dtype if is_part else accumulator(dtype)", "dtype",
            "tests/test_loops.py::test_slices_of_a_half_type_are_added_up_in_float32"),
    Planted("liveness: scratch is not in the peak", "planner/program/program.py",
            "alive.append(live + step.choice.cost.scratch_bytes)", "alive.append(live)",
            "tests/test_plan.py::test_printed_plans_are_those_on_file[gathered-matmul]"),
    Planted("liveness: a value dies before a view of it does", "planner/program/program.py",
            "            base = variables[variable].base", "            base = variable",
            "tests/test_plan.py::test_printed_plans_are_those_on_file[gathered-matmul]"),
    Planted("what a gradient does not read is kept for it", "planner/program/tree.py",
            "any(needs[:i]) or any(needs[i + 1 :])", "any(needs[:i]) or any(needs[i:])",
            "tests/test_plan.py::test_printed_plans_are_those_on_file[gathered-matmul]"),
    Planted("an implicit output keeps the order in which axes appear", "planner/language/parse.py",
            "return (*dots, *sorted(axis for axis, count in counts.items() if count == 1))",
            "return (*dots, *(axis for axis, count in counts.items() if count == 1))",
            "tests/test_spec.py::test_what_parses[ba-inputs2-output2]"),
)  # fmt: skip
