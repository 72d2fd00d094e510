"""Recipes: every value given and explained, mistakes named, the command line wins."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
import yaml

from kp2d_core.architecture import VARIANTS
from kp2d_core.errors import FileError
from kp2d_core.training.config import (
    TrainingConfig,
    config_from_dict,
    find_recipe,
    load_config,
    override,
    shipped_recipes,
)
from kp2d_core.training.model import TrainingModel
from kp2d_core.training.optimizer import Budget, learning_rate, make_budget

RECIPES = sorted((Path(__file__).parents[1] / 'config' / 'train').glob('*.yaml'))


def names_of(config: object, prefix: str = '') -> set[str]:
    names: set[str] = set()
    for item in fields(config):
        value = getattr(config, item.name)
        path = f'{prefix}{item.name}'
        names |= names_of(value, f'{path}.') if is_dataclass(value) else {path}
    return names


def keys_of(values: dict, prefix: str = '') -> set[str]:
    keys: set[str] = set()
    for name, value in values.items():
        path = f'{prefix}{name}'
        keys |= keys_of(value, f'{path}.') if isinstance(value, dict) else {path}
    return keys


def test_the_recipes_are_there():
    assert [path.stem for path in RECIPES] == [
        'fast', 'half', 'small', 'v0', 'v1', 'v2', 'v3', 'v4',
    ]  # fmt: skip


@pytest.mark.parametrize('path', RECIPES, ids=lambda path: path.stem)
def test_a_recipe_gives_every_value_for_its_network(path):
    config = load_config(path)
    assert config.network.architecture() == VARIANTS[path.stem]
    assert keys_of(yaml.safe_load(path.read_text())) == names_of(config)


def test_v4_is_the_default_and_the_paper():
    config = load_config(RECIPES[-1])
    assert config.loss == TrainingConfig().loss
    assert config.pairs == TrainingConfig().pairs
    assert config.photometric == TrainingConfig().photometric
    assert config.optimizer == TrainingConfig().optimizer
    assert (config.optimizer.batch, config.optimizer.epochs) == (8, 50)
    assert (config.loss.location, config.loss.descriptor_weight, config.loss.score) == (1, 2, 1)


def test_variants_differ_as_in_the_paper():
    v0, v1, v2, v3, v4 = (load_config(path) for path in RECIPES[3:])
    crosses = [c.network.cross_border for c in (v0, v1, v2, v3, v4)]
    assert crosses == [False, True, True, True, True]
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
        ('loss.descriptor', 'is not like'),
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
    """A step of a narrow network: what gets no gradient is what the variant does without."""
    config = override(load_config(path), ['network.width=4', 'network.descriptor_size=16'])
    torch.manual_seed(0)
    model = TrainingModel(config)
    images = torch.randint(0, 200, (2, 96, 96, 3), dtype=torch.uint8)
    noise = torch.randint(0, 50, (2, 96, 96, 3), dtype=torch.uint8)
    loss, parts = model(torch.cat([images, images + noise]), torch.eye(3).expand(2, 3, 3), 0)
    loss.backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None}
    assert ('io' in parts) == (path.stem in ('v3', 'v4', 'half'))
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
