"""The `kp2d` command: runs a subcommand and reports a user's mistake in one sentence."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress

from kp2d_core.commands.arguments import HelpFormatter
from kp2d_core.errors import FileError
from kp2d_core.version import __version__

# Each command is kp2d_core/commands/<name>.py with `add_arguments(parser)` and `run(args) -> int`,
# imported only when it runs. setup.py makes an executable of it: `ros2 run kp2d_core <name>`.
COMMANDS: dict[str, str] = {
    'train': 'train a model on images or ROS bags',
    'train-words': 'learn the visual words of a model, which find places again',
    'evaluate': 'measure models and classical methods on HPatches and other tests',
    'make-sequences': 'make test sequences from your own photographs',
    'export': 'write an ONNX model for one size and precision, build TensorRT engines',
    'bench': 'measure the speed of the runtimes, of training or of the node',
    'extract': 'find keypoints in images and save them',
    'match': 'match two images and draw the matches, or match many',
    'odometry': 'estimate the trajectory of a camera and a map from a recording',
    'bag': 'add keypoints and matches to a ROS 2 bag, as the node publishes them',
    'map': 'reconstruct cameras and points from photographs or a recording, as a COLMAP model',
    'info': 'show what this machine can run, or what a model file contains',
    'import-checkpoint': 'convert a .ckpt file of the KP2D authors to .safetensors',
}

# Packages that a small installation lacks, and the extras of setup.py that install them.
EXTRAS = {
    'torch': 'train',
    'tensorboard': 'train',
    'matplotlib': 'eval',
    'jinja2': 'eval',
    'onnx': 'export',
    'onnxruntime': 'onnxruntime',
    'openvino': 'openvino',
    'rosbags': 'bags',
    'rclpy': 'ros',
    'h5py': 'slam',
    'pycolmap': 'slam',
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = arguments[0] if arguments else None
    try:
        parser = build_parser(command)
        args = parser.parse_args(arguments)
        code: int = args.run(args)
        sys.stdout.flush()  # here, where a full disk can still be reported
        return code
    except KeyboardInterrupt:
        print(f'kp2d {command}: interrupted', file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        _forget_output()
        return 0
    except Exception as error:
        if os.environ.get('KP2D_DEBUG'):
            raise
        sentence = explain(error) or _report(error, arguments)
        print(f'kp2d {command}: {sentence}', file=sys.stderr)
        _forget_output()
        return 2


def explain(error: Exception) -> str:
    """Explain the error in a sentence; '' if neither the user nor the machine caused it."""
    if isinstance(error, FileError | ValueError):
        return ' '.join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"{error.name} is not installed: pip install 'kp2d_ros[{EXTRAS[error.name]}]'"
    if isinstance(error, MemoryError):
        return 'there is not enough memory: use smaller images, or fewer at once'
    if isinstance(error, OSError) and error.strerror:
        name = str(error.filename or '')
        name = name if len(name) < 300 else f'{name[:100]}...{name[-100:]}'
        return f'{error.strerror}: {name}' if name else error.strerror
    return ''


def _report(error: Exception, arguments: Sequence[str]) -> str:
    """Write all details of a fault of kp2d to a file and name that file."""
    what = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
    machine = f'kp2d {__version__}, Python {platform.python_version()}, {platform.platform()}'
    details = f'{machine}\narguments: {list(arguments)}\n\n{traceback.format_exc()}'
    try:
        with tempfile.NamedTemporaryFile(
            'w', prefix='kp2d-fault-', suffix='.txt', delete=False, errors='replace'
        ) as file:
            file.write(details)
    except OSError:  # the disk is full
        print(details, file=sys.stderr)
        return f'{what}. This is a fault of kp2d: please report it with the lines above'
    return f'{what}. This is a fault of kp2d: please report it with the file {file.name}'


def _forget_output() -> None:
    """Redirect a broken standard output to nowhere: Python would flush it again at exit."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser(wanted: str | None) -> argparse.ArgumentParser:
    """Build the parser of all commands; only the wanted one is imported and has its arguments."""
    parser = argparse.ArgumentParser(
        prog='kp2d', description='Learned keypoints for robots: train, evaluate, export, run.'
    )
    parser.add_argument('--version', action='version', version=f'kp2d {__version__}')
    commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f'{summary[0].upper()}{summary[1:]}.',
            formatter_class=HelpFormatter,
        )
        if name == wanted:
            module = importlib.import_module(f'kp2d_core.commands.{name.replace("-", "_")}')
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == '__main__':
    sys.exit(main())
