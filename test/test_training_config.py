"""Recipes: the paper's values, the differences, mistakes, and the command line, which wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kp2d_core.architecture import VARIANTS
from kp2d_core.errors import FileError
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.model import TrainingModel
from kp2d_core.training.optimizer import Budget, learning_rate, make_budget
from kp2d_core.training.recipes import (
    config_from_dict,
    find_recipe,
    format_config,
    load_config,
    override,
    shipped_recipes,
)
from kp2d_core.views.homography import HomographyConfig
from kp2d_core.views.pairs import MILD

RECIPES = sorted((Path(__file__).parents[1] / 'config' / 'train').glob('*.yaml'))


@pytest.fixture
def recipes() -> dict[str, TrainingConfig]:
    return {path.stem: load_config(path) for path in RECIPES}


def test_the_recipes_are_there():
    assert [path.stem for path in RECIPES] == [
        'fast', 'half', 'small', 'v0', 'v1', 'v2', 'v3', 'v4-batch8', 'v4',
    ]  # fmt: skip


@pytest.mark.parametrize('path', RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_for_its_network_and_the_papers_are_short(path):
    config = load_config(path)
    assert config.network.architecture() == VARIANTS[path.stem.split('-')[0]]
    if path.stem.startswith('v'):
        assert len(path.read_text().splitlines()) <= 12


@pytest.mark.parametrize('path', RECIPES, ids=lambda path: path.stem)
def test_a_printed_configuration_explains_every_value_and_is_a_recipe(path, tmp_path):
    config = load_config(path)
    text = format_config(config)
    printed = tmp_path / 'printed.yaml'
    printed.write_text(text)
    assert load_config(printed) == config
    settings = [line for line in text.splitlines() if line and not line.rstrip().endswith(':')]
    unexplained = [line for line in settings if '# ' not in line]
    assert [line.split(':')[0].strip() for line in unexplained if 'height' not in line] == []


def test_v4_is_the_paper(recipes):
    """Section 4.2 of the paper; batch norm and border are those of the authors' code."""
    v4 = recipes['v4']
    assert v4 == TrainingConfig()
    assert (v4.optimizer.kind, v4.optimizer.batch, v4.optimizer.learning_rate) == ('adam', 8, 1e-3)
    assert (v4.optimizer.epochs, v4.optimizer.schedule, v4.optimizer.halve_at) == (
        50, 'halve', 40 / 50,
    )  # fmt: skip
    assert (v4.loss.location, v4.loss.descriptor_weight, v4.loss.score, v4.loss.io) == (1, 2, 1, 1)
    assert (v4.loss.margin, v4.loss.relaxation, v4.loss.io_points) == (0.2, 8, 300)
    assert (v4.loss.descriptor, v4.loss.score_of) == ('triplet', 'pair')
    assert (v4.network.dropout, v4.network.dropout_from) == (0.2, 0)
    strong, light = v4.pairs.strong, v4.photometric
    assert (strong.crop, strong.scale, strong.rotation) == (0.7, (0.8, 1.2), 45)
    assert (strong.perspective, light.noise, light.blur) == (0.2, (0.02, 0.02), (1, 3, 5))
    assert light.brightness == light.contrast == (0.5, 1.5)
    assert (light.saturation, light.hue) == ((0.8, 1.2), 0.2)
    assert (light.shuffle, light.gray) == (0.5, 0.5)


def test_v4_batch8_differs_in_what_it_says(recipes):
    wanted = override(recipes['v4'], ['network.dropout=0', 'optimizer.reference_batch=64'])
    assert recipes['v4-batch8'] == wanted
    assert learning_rate(wanted.optimizer, 0, 0.0) == pytest.approx(1e-3 / 8**0.5)


def test_the_recipes_that_ship_models_have_their_values(recipes):
    """Of half, small and fast each; a change here changes what `make weights` trains."""
    for name, wanted in {
        'half': ('half', 16, 12, 1.0, 0.5, 4.0, (180, 320), 1.0),
        'small': ('small', 16, 8, 16.0, 2.0, 3.0, (180, 480), 0.0),
        'fast': ('fast', 8, 8, 16.0, 2.0, 3.0, (180, 480), 0.0),
    }.items():
        config = recipes[name]
        assert wanted == (
            config.network.variant, config.network.width, config.optimizer.batch,
            config.loss.score, config.loss.descriptor_weight, config.loss.match_distance,
            config.pairs.short_side, config.loss.io,
        )  # fmt: skip
        assert config.pairs.mild == replace(MILD, perspective=0.02, stretch=1.1)
        assert config.pairs.strong == HomographyConfig(
            1.0, (0.4, 1.25), 180.0, 0.25, 24.0, False, 2.5, 0.4
        )
        assert config.optimizer.kernel_rate == 0.03 and config.photometric.noise == (0, 0.02)


def test_a_recipe_stands_on_its_base(tmp_path):
    (tmp_path / 'first.yaml').write_text('base: v3\npairs: {mild: {shift: 3}}\nseed: 1')
    second = tmp_path / 'second.yaml'
    second.write_text('base: first.yaml\nloss: {margin: 0.5}')
    config = load_config(second)
    assert (config.network.variant, config.seed, config.loss.margin) == ('v3', 1, 0.5)
    assert config.pairs.mild == replace(MILD, shift=3)  # the rest of the group stays
    for text, message in (
        ('base: second.yaml', 'based on each other'),
        ('base: [v4]', 'base must be the name'),
        ('base: absent', "no recipe 'absent'"),
    ):
        second.write_text(text)
        with pytest.raises(FileError, match=message):
            load_config(second)


def test_older_recipes_and_states_mean_what_they_meant():
    """Noise was drawn from 0 to one number, and the perspective was a share of the crop."""
    old = {
        'photometric': {'noise': 0.03},
        'pairs': {'strong': {'crop': 0.5, 'perspective': 0.2}, 'mild': {'shift': 2}},
        'loss': {'score_of': 'map'},
    }
    config = config_from_dict(old)
    assert config.photometric.noise == (0, 0.03)
    assert config.pairs.strong.perspective == pytest.approx(0.1)
    assert config.pairs.mild == replace(MILD, shift=2)
    assert config.loss.score_of == 'map'


def test_variants_differ_as_in_the_paper(recipes):
    v0, v1, v2, v3, v4 = (recipes[f'v{number}'] for number in range(5))
    crosses = [c.network.cross_border for c in (v0, v1, v2, v3, v4)]
    assert crosses == [False, True, True, True, True]
    assert [c.network.upsample for c in (v0, v1, v2, v3, v4)] == [False, False, True, True, True]
    assert [c.loss.io for c in (v0, v1, v2, v3, v4)] == [0, 0, 0, 1, 1]
    assert [c.loss.descriptor for c in (v2, v3, v4)] == ['triplet', 'none', 'triplet']


def test_override_reaches_every_depth():
    config = override(
        TrainingConfig(),
        [
            'loss.descriptor=infonce',
            'pairs.strong.rotation=180',
            'pairs.mild_share=[[0, 0.2], [100, 0.6]]',
            'optimizer.learning_rate=1e-4',
            'seed=7',
        ],
    )
    assert config.loss.descriptor == 'infonce'
    assert config.pairs.strong.rotation == 180.0
    assert config.pairs.mild_share == ((0, 0.2), (100, 0.6))
    assert config.optimizer.learning_rate == 1e-4
    assert config.seed == 7


@pytest.mark.parametrize(
    ('assignment', 'message'),
    [
        ('loss.descripter=infonce', "no setting 'loss.descripter'"),
        ('loss.descriptor=cosine', 'must be one of triplet, infonce, none'),
        ('loss.descriptor', 'is not NAME=VALUE'),
        ('optimizer.batch=many', 'must be a whole number'),
        ('optimizer.batch=true', 'must be a whole number'),
        ('compute.compile=1', 'must be true or false'),
        ('pairs.strong.scale=[1]', 'must have 2 values'),
        ('pairs.width=100', 'multiples of 8'),
        ('pairs.mild_share=[]', 'needs .step, share. points'),
        ('pairs.strength=[[200, 1], [0, 0]]', 'the steps rising'),
        ('pairs.strong.scale=[0, 1]', 'a range above 0'),
        ('loss.temperature=0', 'above 0'),
        ('loss.io_points=1', '2 or more'),
        ('compute.threads=-1', '0 or more'),
        ('compute.workers=-1', '0 or more'),
        ('report.validation_photographs=-1', '0 or more'),
        ('seed=-1', '0 or more'),
        ('photometric.blur=[2]', 'odd'),
        ('photometric.noise=0.02', 'must be a list'),
        ('photometric.noise=[0.2, 0.1]', 'a range from 0 up'),
        ('optimizer.reference_batch=-1', '0 or more'),
        ('photometric.sharpen=-1', '0 or more'),
        ('pairs.strong.upright=2', 'from 0 to 1'),
        ('optimizer.learning_rate=0', 'above 0'),
        ('optimizer.kernel_rate=-1', 'above 0'),
        ('optimizer.batch=0', 'above 0'),
        ('report.log_every=0', '1 or more'),
        ('seed.x=1', 'is a value'),
        ('loss=3', 'must be a group'),
        ('loss.io=[', 'not a value'),
    ],
)
def test_a_wrong_assignment_is_named(assignment, message):
    with pytest.raises(ValueError, match=message):
        override(TrainingConfig(), [assignment])


def test_a_wrong_file_is_named(tmp_path):
    with pytest.raises(FileError, match='cannot read'):
        load_config(tmp_path / 'absent.yaml')
    path = tmp_path / 'recipe.yaml'
    for text, message in (
        ('loss: [', 'not YAML'),
        ('los: {}', "no setting 'los'"),
        ('3', 'group of settings'),
    ):
        path.write_text(text)
        with pytest.raises(FileError, match=message):
            load_config(path)
    path.write_bytes(b'\xff\xfe\x00')
    with pytest.raises(FileError):
        load_config(path)


def test_a_configuration_survives_its_dict():
    config = override(TrainingConfig(), ['pairs.mild_share=[[0, 0.2], [100, 0.6]]'])
    assert config_from_dict(config.to_dict()) == config


def test_learning_rate_schedules():
    optimizer = TrainingConfig().optimizer
    assert learning_rate(optimizer, 100, 0.79) == 1e-3
    assert learning_rate(optimizer, 100, 0.8) == 5e-4
    cosine = override(
        TrainingConfig(),
        ['optimizer.schedule=cosine', 'optimizer.warmup_steps=10', 'optimizer.final_share=0.1'],
    ).optimizer
    assert learning_rate(cosine, 0, 0.0) == pytest.approx(1e-4)
    assert learning_rate(cosine, 10, 0.0) == pytest.approx(1e-3)
    assert learning_rate(cosine, 10, 0.5) == pytest.approx(0.55e-3)
    assert learning_rate(cosine, 10, 1.0) == pytest.approx(1e-4)


def test_the_budget_is_what_ends_first():
    assert Budget(100, 2).spent(50, 30) == 0.5
    assert Budget(100, 2).spent(10, 90) == 0.75
    optimizer = TrainingConfig().optimizer
    assert make_budget(optimizer, 800, None, None).steps == 5000  # 50 epochs in eights
    assert make_budget(optimizer, 800, 7, None).steps == 7
    assert make_budget(optimizer, 800, None, 3.0).steps == float('inf')


@pytest.mark.parametrize('path', RECIPES, ids=lambda path: path.stem)
def test_every_recipe_trains_all_that_it_uses_and_nothing_else(path):
    """In a step of a narrow network, only parameters that the variant lacks get no gradient."""
    config = override(load_config(path), ['network.width=4', 'network.descriptor_size=16'])
    torch.manual_seed(0)
    model = TrainingModel(config)
    images = torch.randint(0, 200, (2, 96, 96, 3), dtype=torch.uint8)
    noise = torch.randint(0, 50, (2, 96, 96, 3), dtype=torch.uint8)
    loss, parts = model(torch.cat([images, images + noise]), torch.eye(3).expand(2, 3, 3), 0)
    loss.backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None}
    assert ('io' in parts) == (path.stem in ('v3', 'v4', 'v4-batch8', 'half'))
    without = {'v0': ('io_net.', 'network.convFb.'), 'v1': ('io_net.', 'network.convFb.'),
               'v2': ('io_net.',), 'small': ('io_net.',), 'fast': ('io_net.',)}  # fmt: skip
    unused = without.get(path.stem, ())
    assert idle == {n for n, _ in model.named_parameters() if n.startswith(unused)}
    assert not unused or idle
    assert all(torch.isfinite(value) for value in parts.values())


def test_recipes_are_found_by_name(tmp_path):
    assert list(shipped_recipes()) == [path.stem for path in RECIPES]
    assert find_recipe('small') == RECIPES[2]
    mine = tmp_path / 'mine.yaml'
    mine.write_text('seed: 1')
    assert find_recipe(mine) == mine
    with pytest.raises(FileError, match="no recipe 'tiny'.* small, v0"):
        find_recipe('tiny')
