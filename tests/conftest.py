"""What every test runs under: no hub, and every shape and type of the package's signatures checked at each call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import jaxtyping
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers and datasets are imported: they read it then
os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # before anything imports triton: kernels for a GPU then run here, slowly

# Before the first import of hf_kvq: from here on a wrong shape or type fails the test that made the call.
jaxtyping.install_import_hook("hf_kvq", "beartype.beartype")


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """Switch the signature checks off: what a user meets for bad input is the package's own error."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Threads of several processes on a small machine wait for each other far longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shown(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Print a line of figures at the end of the run, whichever process it comes from."""
    return lambda line: record_property("shown", line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """See `shown`."""
    reports = [*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())]
    lines = [(report.nodeid, line) for report in reports for name, line in report.user_properties if name == "shown"]
    if lines:
        terminalreporter.section("figures")
    for _, line in sorted(lines, key=lambda each: each[0]):
        terminalreporter.write_line(line)
