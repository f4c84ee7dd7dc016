"""A plugin of coverage.py and of pytest: the context of a line is the test executing the line.

pytest's own process switches the context before each test, for all threads at once. (A
context started by coverage.py at a call ends with the call, in all threads.) pytest names its
current test in the environment; a process started by a test has this name as its context, and a
fork of the warm process switches to the name, see ``warm``.

coverage.py imports the plugin first: PYTEST_DONT_REWRITE.
"""

import os
from typing import Any

import pytest
from coverage import Coverage, CoveragePlugin

CURRENT = "PYTEST_CURRENT_TEST"


class TestContexts(CoveragePlugin):
    """Gives a child process of a test the context of the test."""

    __test__ = False

    def configure(self, config: Any) -> None:
        """Set the context of this process, and of its forks."""
        config.set_option("run:context", os.environ.get(CURRENT, "").rpartition(" ")[0] or None)


def coverage_init(registry: Any, options: Any) -> None:
    """Register the plugin; coverage.py calls this."""
    registry.add_configurer(TestContexts())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Begin the context of a test."""
    if (running := Coverage.current()) is not None:
        running.switch_context(item.nodeid)
