"""What `test_card.py` runs as a script: a card of which one item raises, one loses it, and one ends its process."""

import os
import signal
import sys

from planner.bench.card import CardComparison, Step, check_items, comparison_items, rate_items, serve


class Fake:
    device, lost = "a fake", False

    def alive(self):
        return not self.lost

    def steps(self):
        yield Step("checks", 200, lambda: check_items(self.checks()))
        yield Step("rates", 100, lambda: rate_items(self.rates()))
        yield Step("slow", 0, lambda: check_items((name, str) for name in "abc"))
        yield Step("calls", 240, lambda: comparison_items(self.comparisons(), self.figures))

    def checks(self):
        yield "right", lambda: ""
        yield "wrong", lambda: "2 entries differ"
        yield "raises", self.raises
        yield "after one that raised", lambda: str(os.getpid())
        yield "loses the card", self.loses
        yield "after a lost card", lambda: str(os.getpid())
        yield "ends", lambda: os.kill(os.getpid(), signal.SIGKILL)

    def raises(self):
        raise ValueError("no such kernel")

    def loses(self):
        self.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    def rates(self):
        yield "copy, bytes/s", lambda: 1e12

    def comparisons(self):
        yield "no arrays", self.none
        yield "two ways", self.two

    def none(self):
        raise MemoryError("too large")
        yield

    def two(self):
        print("a library prints")
        yield CardComparison("sum", {"planner": len, "other": None}, 8.0)

    def figures(self, program):
        if program is None:
            raise RuntimeError("it is not installed")
        return {"seconds": 1e-3, "extra_bytes": 64}


if __name__ == "__main__":
    serve(Fake, "fake", True, sys.argv[1])
