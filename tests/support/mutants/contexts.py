"""A plugin of coverage.py: the context of a line is the test that executes it.

pytest names its current test in the environment, which the processes that a test starts have too,
and forks of a warm process. pytest-cov knows the tests of the process of pytest alone.
"""

from __future__ import annotations

import os
from types import FrameType
from typing import Any

from coverage import CoveragePlugin


class TestContexts(CoveragePlugin):
    """Names the test at each call, until there is a name."""

    __test__ = False

    def dynamic_context(self, frame: FrameType) -> str | None:
        """Return the id of the current test, without its phase."""
        test = os.environ.get("PYTEST_CURRENT_TEST")
        return None if test is None else test.rpartition(" ")[0]


def coverage_init(registry: Any, options: Any) -> None:
    """Register the plugin; coverage.py calls this."""
    registry.add_dynamic_context(TestContexts())
