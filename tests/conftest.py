"""What every test runs under: no hub, and every shape and type of the package's signatures checked at each call."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
