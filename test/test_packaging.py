"""Real installations of the tracked files: colcon build, --symlink-install and pip install."""

from __future__ import annotations

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import xml.etree.ElementTree as ElementTree
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from kp2d_core.cli import COMMANDS
from kp2d_core.version import __version__
from kp2d_ros.startup import NODES

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def run(*command: str | Path, **options) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert result.returncode == 0, f'{command}\n{result.stdout}\n{result.stderr}'
    return result.stdout


def executables() -> dict[str, list[str]]:
    """Package -> names that `ros2 run` must know."""
    return {'kp2d_core': sorted(COMMANDS), 'kp2d_ros': sorted(NODES)}


@dataclass
class Installation:
    prefix: Path
    environment: dict[str, str]

    def python(self, code: str) -> str:
        return run('python3', '-c', code, env=self.environment, cwd=self.prefix).strip()


@pytest.fixture(scope='module')
def checkout(tmp_path_factory) -> Path:
    """The tracked files in their current state, as in a clone."""
    directory = tmp_path_factory.mktemp('clone')
    for name in run('git', 'ls-files', '-z', cwd=ROOT).strip('\0').split('\0'):
        if (ROOT / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)
    return directory


def files_of(checkout: Path, *directories: str) -> list[Path]:
    found = [path for name in directories for path in (checkout / name).rglob('*')]
    return [path.relative_to(checkout) for path in found if path.is_file()]


def colcon(workspace: Path, checkout: Path, *options: str) -> Installation:
    shutil.copytree(checkout, workspace / 'src', symlinks=True)
    environment = {**os.environ, 'PATH': f'{BIN}{os.pathsep}{os.environ["PATH"]}'}
    run(BIN / 'colcon', 'build', *options, cwd=workspace, env=environment)
    sourced = run('sh', '-c', '. install/setup.sh && env -0', cwd=workspace, env=environment)
    variables = dict(line.split('=', 1) for line in sourced.split('\0') if line)
    return Installation(workspace / 'install' / 'kp2d_ros', variables)


def pip_install(prefix: Path, checkout: Path) -> Installation:
    """Install into a new venv that also sees the dependencies of this one."""
    venv.create(prefix, system_site_packages=True)
    own = Path(sysconfig.get_path('purelib', 'posix_prefix', {'base': str(prefix)}))
    ours = sysconfig.get_path('purelib')
    (own / 'dependencies.pth').write_text(f'import site; site.addsitedir({ours!r})\n')
    python = prefix / 'bin' / 'python3'
    run(python, '-m', 'pip', 'install', '--ignore-installed', '--no-deps', '--no-build-isolation',
        checkout)  # fmt: skip
    paths = {'PATH': f'{python.parent}{os.pathsep}{os.environ["PATH"]}'}
    return Installation(prefix, {**os.environ, **paths, 'AMENT_PREFIX_PATH': str(prefix)})


@pytest.fixture(scope='module', params=['colcon', 'colcon --symlink-install', 'pip'])
def installation(request, checkout, tmp_path_factory) -> Installation:
    directory = tmp_path_factory.mktemp('workspace')
    if request.param == 'pip':
        copy = shutil.copytree(checkout, directory / 'src', symlinks=True)
        return pip_install(directory / 'venv', copy)
    return colcon(directory, checkout, *request.param.split()[1:])


def test_colcon_takes_it_for_a_ros_package(checkout):
    # An invalid package.xml would silently make it a plain 'python' one, unknown to ROS.
    listed = run(BIN / 'colcon', 'list', cwd=checkout).split()
    assert listed == ['kp2d_ros', '.', '(ros.ament_python)']


def test_package_xml_is_valid_and_has_the_version():
    from catkin_pkg.package import parse_package

    warnings: list[str] = []
    package = parse_package(str(ROOT / 'package.xml'), warnings=warnings)
    package.validate(warnings=warnings)
    assert not warnings
    assert (package.name, package.version) == ('kp2d_ros', __version__)
    assert package.get_build_type() == 'ament_python'
    assert ElementTree.parse(ROOT / 'package.xml').getroot().get('format') == '3'


def test_pip_install_kp2d_brings_this_version_with_opencv_and_a_runtime(checkout, tmp_path):
    """The metadata of the wheel is right, and every extra that it requires exists."""
    source = shutil.copytree(checkout / 'packaging' / 'kp2d', tmp_path / 'kp2d')
    run(sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation', '-w', tmp_path,
        source)  # fmt: skip
    (wheel,) = tmp_path.glob('kp2d-*.whl')
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith('METADATA'))
        metadata = email.message_from_bytes(archive.read(name))
    assert (metadata['Name'], metadata['Version']) == ('kp2d', __version__)
    required = metadata.get_all('Requires-Dist')
    assert re.sub(r'[-_]', '_', required[0]) == f'kp2d_ros[run]=={__version__}'
    tree = ast.parse((checkout / 'setup.py').read_text())
    (extras,) = (
        ast.literal_eval(node.value) for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == 'EXTRAS'
    )  # fmt: skip
    assert {re.search(r'\[(\w+)\]', line)[1] for line in required} <= set(extras)
    brought = {re.match(r'[\w-]+', line)[0] for line in extras['run']}
    assert brought == {'opencv-contrib-python-headless', 'openvino', 'onnx'}


@pytest.mark.parametrize('package', ['kp2d_core', 'kp2d_ros'])
def test_every_command_and_node_has_an_executable(package):
    shipped = sorted(path.name for path in (ROOT / 'lib' / package).glob('*'))
    script = {'kp2d_core': '../../scripts/command', 'kp2d_ros': '../../scripts/node'}[package]
    assert shipped == executables()[package], f'ln -s {script} lib/{package}/NAME'


def test_both_names_are_in_the_ament_index(installation):
    code = (
        'from ament_index_python.packages import get_package_prefix, get_package_share_directory\n'
        'for name in ("kp2d_core", "kp2d_ros"):\n'
        '    print(get_package_prefix(name), get_package_share_directory(name))'
    )
    prefix = installation.prefix
    assert installation.python(code).splitlines() == [
        f'{prefix} {prefix}/share/{name}' for name in ('kp2d_core', 'kp2d_ros')
    ]
    for name in ('kp2d_core', 'kp2d_ros'):
        assert (prefix / 'share' / name / 'package.xml').is_file()


def test_launch_and_config_files_are_shared(checkout, installation):
    wanted = files_of(checkout, 'launch', 'config', 'integrations')
    share = installation.prefix / 'share' / 'kp2d_ros'
    assert [path for path in wanted if not (share / path).is_file()] == []


def test_every_module_and_its_data_are_installed(checkout, installation):
    where = 'import kp2d_core, pathlib; print(pathlib.Path(kp2d_core.__file__).parents[1])'
    imported_from = Path(installation.python(where))
    workspace = installation.prefix.parents[1]
    assert workspace in imported_from.parents, 'not the installed one'
    wanted = files_of(checkout, 'kp2d_core', 'kp2d_ros')
    assert Path('kp2d_core/detector.py') in wanted
    assert [path for path in wanted if not (imported_from / path).is_file()] == []
    name, version = 'from importlib.metadata import version', 'print(version("kp2d_ros"))'
    assert installation.python(f'{name}; {version}') == __version__


def test_every_executable_is_there_and_helps(installation):
    programs = [
        installation.prefix / 'lib' / package / name
        for package, names in executables().items()
        for name in names
    ]
    programs.append(installation.prefix / 'bin' / 'kp2d')
    for program in programs:
        assert program.is_file()
        assert os.access(program, os.X_OK), f'{program} has no run bit'

    def helps(program: Path) -> str:
        return run(program, '--help', env=installation.environment, cwd=installation.prefix)

    with ThreadPoolExecutor(2) as pool:
        for program, text in zip(programs, pool.map(helps, programs), strict=True):
            assert 'usage:' in text, program
            if program.parent.name == 'kp2d_core':
                assert f'kp2d {program.name}' in text
