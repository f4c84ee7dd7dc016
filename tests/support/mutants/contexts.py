"""A plugin of coverage.py and of pytest: the context of a line is the test that executes it.

pytest's own process switches the context before each test, for all of its threads at once. (A
context that coverage.py starts by a call ends with that call, in all threads.) pytest names its
current test in the environment; a process that a test starts has one context, that name, and a
fork of the warm process switches to it, see ``warm``.

coverage.py imports the plugin first: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from coverage import Coverage, CoveragePlugin

CURRENT = "PYTEST_CURRENT_TEST"


class TestContexts(CoveragePlugin):
    """Gives a child process of a test the context of that test."""

    __test__ = False

    def configure(self, config: Any) -> None:
        """Set the context of this process, and of those that it forks."""
        config.set_option("run:context", os.environ.get(CURRENT, "").rpartition(" ")[0] or None)


def coverage_init(registry: Any, options: Any) -> None:
    """Register the plugin; coverage.py calls this."""
    registry.add_configurer(TestContexts())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Begin the context of a test."""
    if (running := Coverage.current()) is not None:
        running.switch_context(item.nodeid)
