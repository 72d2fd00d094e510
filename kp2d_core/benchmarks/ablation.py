"""`kp2d bench ablation`: the paper's table 1 at reduced scale, V0 to V4 from random weights."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kp2d_core.checkpoint import load_checkpoint
from kp2d_core.checks import parse_json
from kp2d_core.commands.arguments import positive, real_number
from kp2d_core.evaluation.hpatches import load_sequences, write_sequence
from kp2d_core.evaluation.methods import open_methods
from kp2d_core.evaluation.protocol import METRICS, evaluate
from kp2d_core.evaluation.study import paper_rows
from kp2d_core.evaluation.tables import TITLES, figure, markdown
from kp2d_core.files import atomic_write
from kp2d_core.images import read_image
from kp2d_core.threads import set_waiting
from kp2d_core.views.pairs import make_sequences

if TYPE_CHECKING:
    from kp2d_core.training.photographs import Entry

VARIANTS = ('v0', 'v1', 'v2', 'v3', 'v4')
# Half the width and half the resolution. IO-Net sees a quarter of the points, like the cells.
SCALE = (
    'network.width=16',
    'network.descriptor_size=128',
    'pairs.width=160',
    'pairs.height=120',
    'loss.io_points=75',
)
# The two changes of v4-batch8.yaml.
BATCH8 = ('network.dropout=0', 'optimizer.reference_batch=64')
NOT_VALIDATED = ('report.validation_photographs=0',)  # the time is for training alone
SIZE, TOP_K = (320, 240), 300  # of the paper's table 1
HELD_OUT = 20  # photographs that sequences are made of
STEPS = 3500  # V0 takes half an hour of two slow cores, V4 40 minutes
RESULTS, TABLE = 'results.json', 'table.md'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        'Train V0 to V4 of the paper at half the width and half the resolution, from random '
        'weights and for the same number of steps, and print the results next to those of the '
        'paper. If you stop it, the same command continues.'
    )
    parser.add_argument(
        '--data', type=Path, nargs='+', required=True, metavar='PATH',
        help='folders of photographs; 20 photographs are held out for the evaluation',
    )  # fmt: skip
    parser.add_argument(
        '--hpatches', type=Path, metavar='FOLDER',
        help='also evaluate on these sequences in HPatches layout',
    )  # fmt: skip
    parser.add_argument(
        '--steps', type=positive, default=STEPS, help='steps of each run (default: %(default)s)'
    )
    parser.add_argument(
        '--minutes', type=real_number(above=0, most=1e9),
        help='length of each run, instead of --steps',
    )  # fmt: skip
    parser.add_argument('--seeds', type=positive, default=2, help='number of runs per variant')
    parser.add_argument(
        '--runs', nargs='+', metavar='RUN',
        help='train only these, such as v2-1 v4-1 (variant and seed), so that several processes '
        'or machines can share the work',
    )  # fmt: skip
    parser.add_argument(
        '--strict', action='store_true',
        help="use the paper's learning rate and dropout instead of those of the recipe v4-batch8; "
        'with 8 pairs per step, training then stalls',
    )  # fmt: skip
    parser.add_argument(
        '--set', dest='assignments', action='append', default=[], metavar='NAME=VALUE',
        help='change a value of all recipes; may be repeated',
    )  # fmt: skip
    parser.add_argument(
        '--out', type=Path, default=Path('runs/ablation'), metavar='FOLDER',
        help='folder for runs and tables; a run whose figures are in its results.json is finished',
    )  # fmt: skip
    parser.add_argument('--quiet', action='store_true', help='show no progress bars')


def run(args: argparse.Namespace) -> int:
    """Train and measure the missing runs, then write the tables."""
    set_waiting()  # before torch is imported
    from kp2d_core.training.photographs import find_photographs, split

    sets = {'made': args.out / 'made'}
    if args.hpatches:
        load_sequences(args.hpatches)  # report a mistake before hours of training
        sets[args.hpatches.name] = args.hpatches
    everything = [f'{variant}-{seed + 1}' for seed in range(args.seeds) for variant in VARIANTS]
    runs = args.runs or everything
    for unknown in set(runs) - set(everything):
        raise ValueError(f"'{unknown}' is not one of the runs: {', '.join(everything)}")
    to_train, held_out = split(find_photographs(args.data), HELD_OUT, 0)
    make_held_out(held_out, sets['made'])
    for name in runs:
        recorded = read_results(args.out).get(name)
        if recorded and recorded['settings'] != settings_of(args):
            raise ValueError(f'{args.out} has runs with other settings: choose another --out')
        if recorded and set(sets) <= set(recorded['figures']):
            continue
        code = train_one(args, name, to_train)
        if code:
            return code
        record(args, name, sets)
    results = read_results(args.out)
    text = '\n\n'.join(table(results, name, folder) for name, folder in sets.items())
    with atomic_write(args.out / TABLE) as temporary:
        temporary.write_text(f'{text}\n')
    print(f'{text}\n\nwritten to {args.out / TABLE}')
    return 0


def settings_of(args: argparse.Namespace) -> list[str]:
    """What changes the outcome of a run: the settings, but not where they are computed."""
    wanted = [each for each in args.assignments if not each.startswith('compute.')]
    length = f'{args.minutes:g} minutes' if args.minutes else f'{args.steps} steps'
    return [*SCALE, *(() if args.strict else BATCH8), *wanted, length]


def train_one(args: argparse.Namespace, name: str, photographs: list[Entry]) -> int:
    """Train to the end and return 0, or the code of the signal that stopped it."""
    from kp2d_core.training.loop import LAST, STATE, Run, train
    from kp2d_core.training.recipes import find_recipe, load_config, override
    from kp2d_core.training.state import read_state

    variant, seed = name.split('-')
    changes = [*SCALE, *NOT_VALIDATED, *(() if args.strict else BATCH8), *args.assignments]
    config = replace(override(load_config(find_recipe(variant)), changes), seed=int(seed))
    budget = (None, args.minutes) if args.minutes else (args.steps, None)
    out = args.out / name
    begun = (out / STATE).is_file()
    if begun:
        before, progress, _ = read_state(out / STATE)
        if replace(before, compute=config.compute) != config:
            raise ValueError(f'{out} was trained with other settings: choose another --out')
        if (out / LAST).is_file() and (progress.steps, progress.minutes) == budget:
            return 0
    print(f'{name}: {out}', file=sys.stderr)
    return train(
        Run(config, photographs, out, steps=budget[0], minutes=budget[1], resume=begun,
            quiet=args.quiet)
    )  # fmt: skip


def read_results(out: Path) -> dict[str, Any]:
    """What is known of each finished run: settings, steps, figures by set of sequences."""
    path = out / RESULTS
    return dict(parse_json(path.read_bytes())) if path.is_file() else {}


def record(args: argparse.Namespace, name: str, sets: dict[str, Path]) -> None:
    """Measure a trained run. The figures are worth keeping longer than its weights."""
    from kp2d_core.training.loop import LAST

    model = args.out / name / LAST
    figures = {label: measure(folder, [str(model)], []) for label, folder in sets.items()}
    result = {
        'settings': settings_of(args), 'steps': load_checkpoint(model).step, 'figures': figures
    }  # fmt: skip
    results = {**read_results(args.out), name: result}  # others may have written meanwhile
    with atomic_write(args.out / RESULTS) as temporary:
        temporary.write_text(f'{json.dumps(dict(sorted(results.items())), indent=1)}\n')


def make_held_out(photographs: list[Entry], folder: Path) -> None:
    """Make sequences of the held-out photographs, unless they exist."""
    if folder.is_dir():
        return
    unfinished = folder.with_name(f'{folder.name}-{os.getpid()}')
    for number, photograph in enumerate(photographs):
        image = read_image(photograph) if isinstance(photograph, Path) else photograph
        random = np.random.default_rng([0, number])
        for sequence in make_sequences(image, f'{number:02}', SIZE, random):
            write_sequence(unfinished, sequence)
    unfinished.rename(folder)


def measure(folder: Path, models: list[str], baselines: list[str]) -> dict[str, float]:
    """The figures of one method by the paper's protocol."""
    method = open_methods(models, baselines, runtime='torch', size=SIZE, top_k=TOP_K)[0]
    found = evaluate(
        method.extract, load_sequences(folder), size=SIZE, top_k=TOP_K, nms_radius=0, truth='paper'
    )
    return found.mean()


def table(results: dict[str, Any], name: str, folder: Path) -> str:
    """Format every run, the means over the seeds, SIFT and the paper's rows."""

    def row(label: str, figures: dict[str, float], steps: object = '') -> list[str]:
        return [label, *(figure(figures[metric]) for metric in METRICS), str(steps)]

    rows = [['', *(TITLES[metric] for metric in METRICS), 'steps']]
    for variant in VARIANTS:
        found: list[dict[str, float]] = []
        for run_name, result in results.items():
            if run_name.startswith(f'{variant}-') and name in result['figures']:
                found.append(result['figures'][name])
                label = f'{variant.upper()}, seed {run_name.split("-")[1]}'
                rows.append(row(label, found[-1], result['steps']))
        if found:
            means = {
                metric: float(np.mean([each[metric] for each in found])) for metric in METRICS
            }
            rows.append(row(f'**{variant.upper()}, mean**', means))
    rows.append(row('SIFT', measure(folder, [], ['sift'])))
    for paper in paper_rows(SIZE, TOP_K, 'all'):
        if paper.source == 'table 1':
            rows.append(row(f"paper's {paper.method}, full HPatches", paper.metrics))
    pairs = sum(len(sequence.homographies) for sequence in load_sequences(folder))
    return f'{name}: {pairs} pairs, {SIZE[0]}x{SIZE[1]}, best {TOP_K} points\n\n{markdown(rows)}'
