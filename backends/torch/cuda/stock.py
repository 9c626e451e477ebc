"""What torch's own operators take on a card, where that differs from what they do on a CPU; measured on an H200."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.backends.common.stock_rows import flat_index_bytes, stock_kind
from planner.cost.device import Device
from planner.cost.figures import Work
from planner.language.spec import plain_axes, term_axes, term_gathers
from planner.program.forms import known_product
from planner.program.ops import Op

# `Device.add_row_seconds` is measured with rows of so many elements.
_ADDED = 16
# How many times as long as a copy the products of a batch take to move their bytes.
_BATCH = 2.5


def card_work(parts: Sequence[Work], op: Op, device: Device) -> list[Work]:
    """Return the parts of the stock work as a card does them.

    Each element that is added through an index array is an atomic operation. To take rows of one element costs no more
    than their bytes. Each array of a flat index is written, and read twice.
    """
    if stock_kind(op) == "matmul":
        form = known_product(op.spec)
        return [x._replace(seconds=batch_seconds(device, x.moved, form.sizes[0])) if x.flops else x for x in parts]
    if not op.spec.gathers:
        return [*parts]
    taken = added = 0
    for number, term in enumerate(op.spec.terms):
        if gathers := term_gathers(term):
            rows = term_axes(gathers)
            count = math.prod(op.spec.shape(rows))
            width = math.prod(op.spec.shape(tuple(axis for axis in plain_axes(term) if axis not in rows)))
            if number == len(op.spec.inputs):
                added += -(-count * width // _ADDED)
            elif width > 1:
                taken += count
    index = Work(moved=3 * flat_index_bytes(op.spec))
    return [*(x._replace(taken=taken, added=added) if x.taken or x.added else x for x in parts), index]


def batch_seconds(device: Device, moved: int, batch: int) -> float | None:
    """Return the seconds that the products of a batch take to move bytes; None for a single product.

    On an H200 torch's products of 8,000 matrices of 100 x 32 with a vector each reached 1.6 TB/s, those of 64 matrices
    of 4,096 x 128 with 8 vectors 1.8, where a copy reaches 4.2.
    """
    return _BATCH * device.moving_seconds(moved) if device.kind == "cuda" and batch > 1 else None
