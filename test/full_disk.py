"""A real full disk: a small file system in memory, visible to one process only."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


def run_on_full_disk(
    command: list[str], folder: Path, room: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command with limited room ('16k') in `folder`; skip without permission to mount."""
    if shutil.which('unshare') is None:
        pytest.skip('unshare is not installed')
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={room} none {folder} && "$@"'
    within = ['unshare', '-rm', 'sh', '-c', mount, 'sh']
    if subprocess.run([*within, 'true'], capture_output=True).returncode:
        pytest.skip('this system lets nobody mount')
    return subprocess.run(
        [*within, *command], capture_output=True, text=True, timeout=120, **options
    )
