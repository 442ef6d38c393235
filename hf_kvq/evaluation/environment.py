"""What a measurement ran on: versions, threads, hardware, and the commit of this package."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_kvq import __version__

__all__ = ["Environment", "current_environment"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions and hardware.

    Attributes:
        python: Version of the interpreter.
        torch: Version of torch.
        transformers: Version of transformers.
        tokenizers: Version of tokenizers.
        hf_kvq: Version of this package.
        commit: Git commit of this package, with `-dirty` where files differ from it; None where it is no git checkout.
        platform: Operating system and architecture.
        cpu: Name of the processor.
        cores: Cores that this process may use.
        threads: Threads that torch used.
        device: Name of the device that the model ran on.
    """

    python: str
    torch: str
    transformers: str
    tokenizers: str
    hf_kvq: str
    commit: str | None
    platform: str
    cpu: str
    cores: int
    threads: int
    device: str


def current_environment(device: torch.device) -> Environment:
    """Describe this process, for a model on `device`."""
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers"),
        tokenizers=importlib.metadata.version("tokenizers"),
        hf_kvq=__version__,
        commit=_commit(Path(__file__).parent),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0))
        if os.name == "posix" and platform.system() == "Linux"
        else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _commit(folder: Path) -> str | None:
    """Commit of the repository that tracks this file; an environment that merely lies inside a repository has none."""
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--", "..")
    return f"{commit}-dirty" if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or no repository
        return None
    return done.stdout.strip()
