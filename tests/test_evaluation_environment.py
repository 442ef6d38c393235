"""What a receipt says of the machine and of the package's own version."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

import hf_kvq
from hf_kvq.evaluation.environment import _commit, current_environment


@pytest.fixture
def git(tmp_path):
    """A repository with a copy of the package in it, and a way to run git there."""
    package = tmp_path / "hf_kvq" / "evaluation"
    package.mkdir(parents=True)
    (package / "environment.py").write_text("")

    def run(*arguments):
        identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    run("init", "-q")
    run("commit", "-q", "--allow-empty", "-m", "first")
    return run, package


def test_a_package_that_merely_lies_inside_a_repository_has_no_commit(git):
    _, package = git
    assert _commit(package) is None


def test_the_commit_is_that_of_the_package_and_says_when_files_differ_from_it(git):
    run, package = git
    run("add", ".")
    run("commit", "-q", "-m", "package")
    commit = run("rev-parse", "HEAD")
    assert _commit(package) == commit
    (package.parent / "config.py").write_text("changed")
    assert _commit(package) == f"{commit}-dirty"


def test_without_git_there_is_no_commit(git, monkeypatch, tmp_path):
    _, package = git
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert _commit(package) is None


def test_versions_and_threads_are_those_of_this_process():
    found = current_environment(torch.device("cpu"))
    assert (found.hf_kvq, found.torch, found.device) == (hf_kvq.__version__, torch.__version__, "cpu")
    assert found.threads == torch.get_num_threads()
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.cpu
