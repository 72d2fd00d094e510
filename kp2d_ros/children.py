"""Nodes as child processes, as `make run` and `kp2d bench node` start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import IO, Any

from kp2d_ros.blas import ENVIRONMENT


def start_node(
    module: str, log: IO[bytes], parameters: dict[str, Any], *arguments: str, **environment: str
) -> subprocess.Popen[bytes]:
    """kp2d_ros.<module> in a process that Ctrl-C does not reach: it is told to end."""
    # JSON is YAML, and keeps the string '0' a string.
    given = [f'{name}:={json.dumps(value)}' for name, value in parameters.items()]
    options = [part for value in given for part in ('-p', value)]
    return subprocess.Popen(
        [sys.executable, '-m', f'kp2d_ros.{module}', '--ros-args', *options, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**ENVIRONMENT, **os.environ, **environment},
    )
