"""The `kp2d` command: finds the subcommand, turns a user's mistake into one sentence."""

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

# Each is kp2d_core/commands/<name>.py with `add_arguments(parser)` and `run(args) -> int`,
# imported only when it is used; and an executable for `ros2 run kp2d_core <name>` (setup.py).
COMMANDS: dict[str, str] = {
    'train': 'train a model on images or ROS bags',
    'evaluate': 'measure models and classical methods on HPatches and other tests',
    'make-sequences': 'make test sequences from your own photographs',
    'export': 'write an ONNX model for one size and precision, build TensorRT engines',
    'bench': 'measure the speed of the runtimes, of training or of the node',
    'extract': 'find keypoints in images and save them',
    'match': 'match two images and draw the matches, or match many',
    'odometry': 'estimate the trajectory of a camera and a map from a recording',
    'bag': 'add keypoints and matches to a ROS 2 bag, as the node publishes them',
    'map': 'reconstruct cameras and points from photographs or a recording, as a COLMAP model',
    'info': 'show what this machine can run, or what is inside a model file',
    'import-checkpoint': "turn the KP2D authors' .ckpt into a .safetensors model",
}

# What a small installation leaves out, and the extra of setup.py that brings it.
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
        sys.stdout.flush()  # here, where a full disk can still be told
        return code
    except KeyboardInterrupt:
        print(f'kp2d {command}: interrupted', file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
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
    """What happened, in a sentence; '' if it is nothing that a user or the machine did."""
    if isinstance(error, FileError | ValueError):
        return ' '.join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"{error.name} is not installed: pip install 'kp2d_ros[{EXTRAS[error.name]}]'"
    if isinstance(error, MemoryError):
        return 'there is not enough memory: take smaller images, or fewer at once'
    if isinstance(error, OSError) and error.strerror:
        name = str(error.filename or '')
        name = name if len(name) < 300 else f'{name[:100]}...{name[-100:]}'
        return f'{error.strerror}: {name}' if name else error.strerror
    return ''


def _report(error: Exception, arguments: Sequence[str]) -> str:
    """Keep all that is known of a fault of ours in a file, and say where it is."""
    what = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
    machine = f'kp2d {__version__}, Python {platform.python_version()}, {platform.platform()}'
    told = f'{machine}\narguments: {list(arguments)}\n\n{traceback.format_exc()}'
    try:
        with tempfile.NamedTemporaryFile(
            'w', prefix='kp2d-fault-', suffix='.txt', delete=False, errors='replace'
        ) as file:
            file.write(told)
    except OSError:  # no room even for that
        print(told, file=sys.stderr)
        return f'{what}. This is a fault of kp2d: please report it with the lines above'
    return f'{what}. This is a fault of kp2d: please report it with the file {file.name}'


def _forget_output() -> None:
    """Nothing can be written there any more, and Python would try again as it ends."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser(wanted: str | None) -> argparse.ArgumentParser:
    """The whole parser; only the wanted command is imported and has its arguments."""
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
