"""Run `python -m planner.bench`."""

import sys

from planner.bench.command import main

sys.exit(main())
