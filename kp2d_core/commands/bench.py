"""kp2d bench: measure the speed of the runtimes, of training or of the node."""

from __future__ import annotations

import argparse
import importlib

from kp2d_core.commands.arguments import HelpFormatter

SUBJECTS = {
    'runtimes': (
        'kp2d_core.benchmarks.runtimes',
        "the speed of the runtimes, compared with the authors' code",
    ),
    'train': (
        'kp2d_core.benchmarks.training',
        'the speed of a training step, compared with a plain implementation',
    ),
    'ablation': (
        'kp2d_core.benchmarks.ablation',
        'the quality of V0 to V4 of the paper, trained for the same time',
    ),
    'node': ('kp2d_ros.benchmark.node', 'latency, throughput and memory of the ROS node'),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kp2d_core.benchmarks import runtimes

    runtimes.add_arguments(parser)
    parser.set_defaults(measure=runtimes.run)
    subjects = parser.add_subparsers(
        title='what to measure', metavar='[runtimes|train|ablation|node]'
    )
    for name, (module_name, summary) in SUBJECTS.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # not part of this installation
            continue
        subject = subjects.add_parser(
            name, help=summary, description=f'Measure {summary}.', formatter_class=HelpFormatter
        )
        module.add_arguments(subject)
        subject.set_defaults(measure=module.run)


def run(args: argparse.Namespace) -> int:
    code: int = args.measure(args)
    return code
