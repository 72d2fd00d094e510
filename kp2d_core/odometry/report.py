"""Report runs of the odometry: a table, plots of the path, files, an HTML page."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kp2d_core.evaluation.plots import COLOURS, STYLE
from kp2d_core.evaluation.report import template
from kp2d_core.files import atomic_write
from kp2d_core.odometry.geometry import Matrix
from kp2d_core.odometry.odometry import State
from kp2d_core.odometry.recordings import Recording
from kp2d_core.odometry.runs import Run, Score, score
from kp2d_core.odometry.trajectory import align
from kp2d_core.version import __version__

COLUMNS = {
    'frames': 'frames with a final pose / all frames',
    'lost': 'lost frames after the start, when they arrived',
    'ATE': 'absolute trajectory error: RMS position error of the final poses after alignment, m',
    'of path': 'ATE as a share of the length of the path',
    'causal': 'ATE of the poses as reported when each frame arrived, m',
    'worst': 'largest position error of any reported pose, each map aligned separately, m',
    'RPE': 'relative pose error: RMS error of the motion between successive frames, m',
    'turn': 'the same for the rotation, degrees',
    'scale': 'scale error of the final poses; stereo only',
    'maps': 'number of maps at the end',
    'loops': 'number of closed loops',
    'keyframes': 'keyframes of the largest map',
    'features ms': 'CPU time per frame for features',
    'odometry ms': 'CPU time per frame for pose and map',
    'Hz': 'frames per second, features and odometry one after the other',
}


STATE_COLOURS = {
    State.STARTING: '#cbd5e1',
    State.TRACKING: '#22c55e',
    State.LOST: '#dc2626',
    State.RELOCALISED: '#eab308',
    State.NEW_MAP: '#2563eb',
}


def rows(runs: list[Run], recording: Recording) -> dict[str, dict[str, str]]:
    """Method -> column -> text; medians over the seeds."""
    found: dict[str, dict[str, str]] = {}
    for method in dict.fromkeys(run.method for run in runs):
        mine = [run for run in runs if run.method == method]
        scores = [each for each in (score(run, recording) for run in mine) if each is not None]
        found[method] = _row(mine, scores, recording)
    return found


def _row(runs: list[Run], scores: list[Score], recording: Recording) -> dict[str, str]:
    def median(values: list[float]) -> float:
        return float(np.median(values)) if values else float('nan')

    frames = len(runs[0].stamps)
    row = {
        'frames': f'{median([float(len(run.chosen())) for run in runs]):.0f}/{frames}',
        'lost': f'{median([float(run.states.count(State.LOST)) for run in runs]):.0f}',
    }
    if scores:
        row |= {
            'ATE': f'{median([s.final.ate for s in scores]):.4f}',
            'of path': f'{median([s.final.ate / s.length for s in scores]):.2%}',
            'causal': f'{median([s.causal.ate for s in scores]):.4f}',
            'worst': f'{median([s.worst for s in scores]):.4f}',
            'RPE': f'{median([s.final.rpe for s in scores]):.4f}',
            'turn': f'{median([s.final.rpe_degrees for s in scores]):.3f}',
        }
        if recording.stereo:
            row['scale'] = f'{median([s.true_scale - 1 for s in scores]):+.2%}'
    each = 1000 / max(frames, 1)
    first = max(run.feature_seconds for run in runs)
    wall = sum(run.wall_seconds or 0.0 for run in runs)
    return row | {
        'maps': f'{median([float(len(set(run.maps[run.maps >= 0]))) for run in runs]):.0f}',
        'loops': f'{median([float(run.loops) for run in runs]):.0f}',
        'keyframes': f'{median([float(run.keyframes) for run in runs]):.0f}',
        'features ms': f'{first * each:.0f}',
        'odometry ms': f'{median([run.odometry_seconds for run in runs]) * each:.0f}',
        'Hz': f'{frames / max(wall, 1e-9):.1f}',
    }


def format_rows(found: dict[str, dict[str, str]]) -> str:
    """A table to print."""
    columns = [name for name in COLUMNS if any(name in row for row in found.values())]
    lines = [['', *columns]]
    lines += [[method, *(row.get(name, '-') for name in columns)] for method, row in found.items()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return '\n'.join(
        '  '.join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def write_ply(path: str | Path, points: Matrix) -> None:
    """Points (N, 3), binary."""
    header = (
        f'ply\nformat binary_little_endian 1.0\ncomment kp2d {__version__}\n'
        f'element vertex {len(points)}\n'
        'property float x\nproperty float y\nproperty float z\nend_header\n'
    )
    with atomic_write(path) as temporary:
        temporary.write_bytes(header.encode() + points.astype('<f4').tobytes())


def write_json(
    path: str | Path,
    runs: list[Run],
    recording: Recording,
    hardships: dict[str, dict[str, str]] | None = None,
) -> None:
    """Write the figures of all runs, and the table of --hardships if there is one."""

    def entry(run: Run) -> dict[str, Any]:
        found = score(run, recording)
        return {
            'method': run.method,
            'seed': run.seed,
            'frames': len(run.stamps),
            'posed': len(run.chosen()),
            'states': {str(state): run.states.count(state) for state in dict.fromkeys(run.states)},
            'keyframes': run.keyframes,
            'points': len(run.points),
            'loops': run.loops,
            'wall_seconds': run.wall_seconds,
            'feature_seconds': run.feature_seconds,
            'odometry_seconds': run.odometry_seconds,
            'finish_seconds': run.finish_seconds,
            'errors': None if found is None else asdict(found),
        }

    content: dict[str, Any] = {
        'kp2d_version': __version__,
        'recording': recording.name,
        'stereo': recording.stereo,
        'runs': [entry(run) for run in runs],
    }
    if hardships:
        content['hardships'] = hardships
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + '\n')


def plot_path(runs: list[Run], recording: Recording) -> bytes:
    """The paths from above and from the side as SVG, the first seed of each method."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 5.2), layout='constrained')
        above, off = figure.subplots(1, 2, width_ratios=(1.15, 1))
        truth = recording.truth
        if truth is not None:
            known = truth[np.isfinite(truth[:, 0, 0])]
            above.plot(known[:, 0, 3], known[:, 2, 3], color='#94a3b8', lw=4, label='truth')
        first = [run for run in runs if run.seed == 0]
        for run, colour in zip(first, COLOURS, strict=False):
            mine = run.chosen()
            poses, distances = _aligned(run, recording, mine)
            above.plot(poses[:, 0, 3], poses[:, 2, 3], color=colour, lw=1.6, label=run.method)
            if distances is not None:
                off.plot(run.stamps[mine] - run.stamps[0], distances, color=colour, lw=1.4)
            elif len(mine):
                since = run.stamps[mine] - run.stamps[0]
                off.plot(since, poses[:, 1, 3], color=colour, lw=1.4)
        above.set_aspect('equal', 'datalim')
        unit = 'm' if truth is not None or recording.stereo else 'arbitrary units'
        above.set(title='From above', xlabel=f'right, {unit}', ylabel=f'forward, {unit}')
        title = 'Distance from the truth, m' if truth is not None else f'Down, {unit}'
        off.set(title=title, xlabel='s')
        figure.legend(*above.get_legend_handles_labels(), loc='outside lower center', ncols=6)
        buffer = io.BytesIO()
        figure.savefig(buffer, format='svg', transparent=True, metadata={'Date': None})
    return buffer.getvalue()


def _aligned(run: Run, recording: Recording, mine: Any) -> tuple[Matrix, Matrix | None]:
    """Return the final poses, aligned with the ground truth if there is one, and their errors."""
    poses = run.final[mine]
    if recording.truth is None or len(mine) < 3:
        return poses, None
    truth = recording.truth[mine]
    known = np.isfinite(truth[:, 0, 0])
    if known.sum() < 3:
        return poses, None
    found = align(poses[known, :3, 3], truth[known, :3, 3], with_scale=not recording.stereo)
    aligned = found.poses(poses)
    return aligned, np.linalg.norm(aligned[:, :3, 3] - truth[:, :3, 3], axis=1)


def write_html(folder: Path, runs: list[Run], recording: Recording) -> Path:
    """Write a self-contained HTML page."""
    found = rows(runs, recording)
    columns = [name for name in COLUMNS if any(name in row for row in found.values())]
    seeds = max(run.seed for run in runs) + 1
    facts = [
        f'{len(runs[0].stamps)} frames',
        'two cameras, metric' if recording.stereo else 'one camera: the scale is arbitrary',
        f'{seeds} seeds, medians' if seeds > 1 else '1 seed',
    ]
    text = template(Path(__file__).parent, 'odometry.html').render(
        name=recording.name,
        facts=facts,
        columns={name: COLUMNS[name] for name in columns},
        rows=found,
        path=plot_path(runs, recording),
        runs=[run for run in runs if run.seed == 0],
        colours=STATE_COLOURS,
        version=__version__,
    )
    path = folder.expanduser() / 'index.html'
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding='utf-8')
    return path
