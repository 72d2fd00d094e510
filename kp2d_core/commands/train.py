"""`kp2d train`: a keypoint model from a folder of images or a ROS bag."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from kp2d_core.commands.arguments import positive, real_number, whole_number
from kp2d_core.threads import set_waiting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group('data')
    data.add_argument(
        '--data', type=Path, nargs='+', metavar='PATH',
        help='folders of images (searched recursively), image files, ROS 2 bags; --resume knows '
        'them',
    )  # fmt: skip
    data.add_argument('--topic', help='of a bag (default: every topic with images)')
    data.add_argument(
        '--every', type=real_number(least=0, most=1e6), metavar='SECONDS',
        help='take a frame of a bag no more often (default: 0.5)',
    )  # fmt: skip
    data.add_argument(
        '--val', type=Path, metavar='FOLDER',
        help='validate on these: HPatches layout, or photographs (default: some of --data)',
    )  # fmt: skip
    recipe = parser.add_argument_group('recipe')
    recipe.add_argument(
        '--config',
        metavar='RECIPE',
        help='small, v0, v1, v2, v3, v4 (those of the paper), or a YAML file (default: small)',
    )
    recipe.add_argument(
        '--set', dest='assignments', action='append', default=[], metavar='NAME=VALUE',
        help='change a value of the recipe, such as loss.descriptor=infonce; repeatable',
    )  # fmt: skip
    recipe.add_argument(
        '--seed', type=whole_number(), help='of everything random (default: the recipe)'
    )
    recipe.add_argument(
        '--init', metavar='MODEL', help='begin with the weights of a model, not with random ones'
    )
    budget = parser.add_argument_group('how long')
    budget.add_argument(
        '--steps', type=positive, help='end after so many (default: the recipe, if no --minutes)'
    )
    budget.add_argument(
        '--minutes',
        type=real_number(above=0, most=1e9),
        help='end after so many, over all parts of a resumed run',
    )
    run = parser.add_argument_group('run')
    run.add_argument(
        '--out', type=Path, default=Path('runs/train'), metavar='FOLDER',
        help='where checkpoints and reports go',
    )  # fmt: skip
    run.add_argument(
        '--resume', action='store_true', help='go on exactly where the run in --out stopped'
    )
    run.add_argument('--quiet', action='store_true', help='no progress bar')


def run(args: argparse.Namespace) -> int:
    set_waiting()  # before torch is imported
    from kp2d_core.training.config import find_recipe, load_config, override
    from kp2d_core.training.loop import STATE, Run, check_new, train
    from kp2d_core.training.photographs import find_entries
    from kp2d_core.training.state import read_state

    if args.resume:
        if args.config or args.init:
            raise ValueError(
                '--resume goes on with its own recipe and weights: leave out --config and --init; '
                '--set changes a value'
            )
        config, progress, _ = read_state(args.out / STATE)
        data = data_of(args, progress.data)
        validation = args.val or (Path(progress.validation) if progress.validation else None)
    else:
        data, validation = data_of(args, {}), args.val
        config = load_config(find_recipe(args.config or 'small'))
        check_new(args.out)
    config = override(config, args.assignments)
    if args.seed is not None:
        config = replace(config, seed=args.seed)
    return train(
        Run(
            config,
            find_entries(
                [Path(path) for path in data['paths']], topic=data['topic'], seconds=data['every']
            ),
            args.out,
            validation=validation,
            steps=args.steps,
            minutes=args.minutes,
            resume=args.resume,
            initial=args.init,
            quiet=args.quiet,
            data=data,
        )
    )


def data_of(args: argparse.Namespace, known: dict[str, Any]) -> dict[str, Any]:
    """What to train on: as it is given, else as the run that is resumed knows it."""
    if args.data is None:
        if not {'paths', 'topic', 'every'} <= set(known):
            raise ValueError('give --data: folders of images, image files or ROS 2 bags')
        if args.topic is not None or args.every is not None:
            raise ValueError('--topic and --every go with --data')
        return known
    every = 0.5 if args.every is None else args.every
    paths = [str(path.absolute()) for path in args.data]
    return {'paths': paths, 'topic': args.topic, 'every': every}
