"""`kp2d train`: train a keypoint model on images or ROS bags."""

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
        help='folders of images (searched recursively), image files or ROS 2 bags (default with '
        '--resume: those of the run)',
    )  # fmt: skip
    data.add_argument('--topic', help='image topic of a bag (default: all image topics)')
    data.add_argument(
        '--every', type=real_number(least=0, most=1e6), metavar='SECONDS',
        help='shortest time between two frames taken from a bag (default: 0.5)',
    )  # fmt: skip
    data.add_argument(
        '--val', type=Path, metavar='FOLDER',
        help='validate on this folder: photographs, or sequences in HPatches layout (default: '
        'hold out some images of --data)',
    )  # fmt: skip
    recipe = parser.add_argument_group('recipe')
    recipe.add_argument(
        '--config',
        metavar='RECIPE',
        help='small, fast, half, v0 to v4 (the variants of the paper), v4-batch8, or a YAML file '
        '(default: small)',
    )
    recipe.add_argument(
        '--set', dest='assignments', action='append', default=[], metavar='NAME=VALUE',
        help='change a value of the recipe, such as optimizer.batch=4; may be repeated',
    )  # fmt: skip
    recipe.add_argument(
        '--print-config', action='store_true',
        help='print every value of the recipe with its meaning, as YAML, and exit',
    )  # fmt: skip
    recipe.add_argument(
        '--seed', type=whole_number(), help='random seed (default: that of the recipe)'
    )
    recipe.add_argument(
        '--init', metavar='MODEL', help='start from the weights of this model (default: random)'
    )
    budget = parser.add_argument_group('how long')
    budget.add_argument(
        '--steps', type=positive, metavar='N',
        help='stop after N steps (default: as in the recipe, unless --minutes is given)',
    )  # fmt: skip
    budget.add_argument(
        '--minutes',
        type=real_number(above=0, most=1e9),
        metavar='N',
        help='stop after N minutes, counted over all parts of a resumed run',
    )
    run = parser.add_argument_group('run')
    run.add_argument(
        '--out', type=Path, default=Path('runs/train'), metavar='FOLDER',
        help='folder for checkpoints and reports',
    )  # fmt: skip
    run.add_argument(
        '--resume', action='store_true', help='continue the run in --out exactly where it stopped'
    )
    run.add_argument('--quiet', action='store_true', help='show no progress bar')


def run(args: argparse.Namespace) -> int:
    set_waiting()  # before torch is imported
    from kp2d_core.training.loop import STATE, Run, check_new, train
    from kp2d_core.training.photographs import find_entries
    from kp2d_core.training.recipes import find_recipe, format_config, load_config, override
    from kp2d_core.training.state import read_state

    known, validation = dict[str, Any](), args.val
    if args.resume:
        if args.config or args.init:
            raise ValueError(
                '--resume uses the recipe and weights of the run: do not give --config or --init; '
                'change values with --set'
            )
        config, progress, _ = read_state(args.out / STATE)
        known = progress.data
        validation = args.val or (Path(progress.validation) if progress.validation else None)
    else:
        config = load_config(find_recipe(args.config or 'small'))
    config = override(config, args.assignments)
    if args.seed is not None:
        config = replace(config, seed=args.seed)
    if args.print_config:
        print(format_config(config), end='')
        return 0
    data = data_of(args, known)
    if not args.resume:
        check_new(args.out)
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
    """Return the training data: --data if given, else the data of the resumed run."""
    if args.data is None:
        if not {'paths', 'topic', 'every'} <= set(known):
            raise ValueError('give --data: folders of images, image files or ROS 2 bags')
        if args.topic is not None or args.every is not None:
            raise ValueError('--topic and --every need --data')
        return known
    every = 0.5 if args.every is None else args.every
    paths = [str(path.absolute()) for path in args.data]
    return {'paths': paths, 'topic': args.topic, 'every': every}
