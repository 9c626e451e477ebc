"""The steps of all trees as a graph, and the best tree in it.

An edge is a step: it leads from the values that the step reads to the value that it computes. The best tree is found by
dynamic programming over the values. Keys of edges only ever rise. So only those values are looked at again whose best
edge got dearer, or reads a value that did.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence

from planner.program.ops import Op
from planner.program.tree import Tree
from planner.search.exact.steps import Key

# A key is four integers; in one integer each takes this many bits.
_BITS = 192
# Ties are decided by the last three up to this size. Thousands of them can be added up.
_MOST = (1 << 160) - 1


def pack(key: Key) -> int:
    """Return a key as one integer. Sums and comparisons of such integers are those of keys."""
    first, *ties = key
    second, third, fourth = [min(entry, _MOST) for entry in ties]
    return ((first << _BITS | second) << _BITS | third) << _BITS | fourth


def unpack(packed: int) -> Key:
    """Return the key that an integer stands for."""
    mask = (1 << _BITS) - 1
    return (packed >> 3 * _BITS, packed >> 2 * _BITS & mask, packed >> _BITS & mask, packed & mask)


def first_of(packed: int) -> int:
    """Return the first of the four integers, rounded down if the packed key is a difference."""
    return packed >> 3 * _BITS


class Edge:
    """A step that computes a value.

    Attributes:
        result: the number of the value.
        children: the numbers of the values that it reads; empty if it reads an operand.
        key: what it adds to the score, as one integer; a lower bound until the step is priced.
        priced: whether it is priced.
        op: what it computes, once it is known; None too for an operand that is read as it is.
        tree: the tree of the operand that it reads; None if it reads values.
    """

    __slots__ = ("children", "key", "op", "priced", "result", "tree")

    def __init__(self, result: int, children: tuple[int, ...], key: int) -> None:
        self.result, self.children, self.key, self.priced = result, children, key, False
        self.op: Op | None = None
        self.tree: Tree | None = None


class StepGraph:
    """The best tree of a graph whose keys rise.

    Args:
        edges: the edges; those into a value come before those that read it. Of equally good ones the first is taken.
        root: the number of the value that trees compute.
    """

    def __init__(self, edges: Iterable[Edge], root: int) -> None:
        self.root = root
        self._into: dict[int, list[Edge]] = {}
        self._users: dict[int, list[Edge]] = defaultdict(list)
        for edge in edges:
            self._into.setdefault(edge.result, []).append(edge)
            for child in edge.children:
                self._users[child].append(edge)
        self._order = list(self._into)
        self._rank = {value: rank for rank, value in enumerate(self._order)}
        self._best: dict[int, Edge] = {}
        self._keys: dict[int, int] = {}
        for value in self._order:
            self._choose(value)

    @property
    def key(self) -> int:
        """The key of the best tree."""
        return self._keys[self.root]

    def best_edges(self) -> list[Edge]:
        """Return the edges of the best tree, those into a value before those that read it."""
        edges, stack = [], [self.root]
        while stack:
            edge = self._best[stack.pop()]
            edges.append(edge)
            stack += edge.children
        return edges[::-1]

    def raise_keys(self, edges: Sequence[Edge]) -> None:
        """Find the best tree again after the keys of some of its edges have risen."""
        queue = [self._rank[edge.result] for edge in edges]
        heapq.heapify(queue)
        done = -1
        while queue:
            rank = heapq.heappop(queue)
            if rank == done:
                continue
            done = rank
            value = self._order[rank]
            if self._choose(value):
                for user in self._users[value]:
                    if self._best.get(user.result) is user:
                        heapq.heappush(queue, self._rank[user.result])

    def drop_worse(self, limit: int) -> int:
        """Drop the edges that are in no tree with this key or a lower one. Return how many others lack a price."""
        outside, unpriced = {self.root: 0}, 0
        for value in reversed(self._order):
            above = outside.get(value)
            if above is None:
                self._into[value] = []
                continue
            kept = []
            for edge in self._into[value]:
                if any(child not in self._keys for child in edge.children):
                    continue
                total = above + edge.key + sum([self._keys[child] for child in edge.children])
                if total > limit:
                    continue
                kept.append(edge)
                unpriced += not edge.priced
                for child in edge.children:
                    outside[child] = min(outside.get(child, total), total - self._keys[child])
            self._into[value] = kept
        return unpriced

    def _choose(self, value: int) -> bool:
        """Find the best edge into a value. Return whether the value's key has changed."""
        keys, least, best = self._keys, -1, None
        for edge in self._into[value]:
            key = edge.key
            for child in edge.children:
                if child not in keys:
                    break
                key += keys[child]
            else:
                if best is None or key < least:
                    least, best = key, edge
        if best is None:
            return False
        changed = keys.get(value) != least
        keys[value], self._best[value] = least, best
        return changed
