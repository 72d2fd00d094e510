"""Import rules: kp2d_core without rclpy, its inference part without torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip('safetensors')  # without which there is nothing to import

ROOT = Path(__file__).parents[1]
BLOCKER = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ImportError(name + ' is blocked')
sys.meta_path.insert(0, Blocker())
for name in {modules!r}:
    importlib.import_module(name)
"""


def modules_of(package: str) -> list[str]:
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / package).rglob('*.py'))]
    names = ['.'.join(path.with_suffix('').parts) for path in paths]
    return [re.sub(r'\.__init__$', '', name) for name in names]


# Modules for training, or for running with torch.
MAY_NEED_TORCH = re.compile(
    r'kp2d_core\.(networks|training|runtimes\.torch|commands\.train'
    r'|benchmarks\.(plain|training|judge))\b'
)


def import_without(blocked: set[str], modules: list[str]) -> subprocess.CompletedProcess[str]:
    code = BLOCKER.format(blocked=blocked, modules=modules)
    environment = {**os.environ, 'PYTHONPATH': f'{ROOT}{os.pathsep}{os.getenv("PYTHONPATH", "")}'}
    return subprocess.run(
        [sys.executable, '-c', code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_blocker_blocks():
    result = import_without({'torch'}, ['torch.nn'])
    assert 'ImportError: torch is blocked' in result.stderr


def test_core_needs_no_ros():
    ros = {'rclpy', 'sensor_msgs', 'std_msgs', 'ament_index_python', 'kp2d_ros'}
    result = import_without(ros, modules_of('kp2d_core'))
    assert result.returncode == 0, result.stderr


def test_running_half_needs_no_torch():
    modules = [name for name in modules_of('kp2d_core') if not MAY_NEED_TORCH.match(name)]
    assert {'kp2d_core.detector', 'kp2d_core.matching', 'kp2d_core.tracking'} <= set(modules)
    result = import_without({'torch', 'torchvision'}, modules)
    assert result.returncode == 0, result.stderr


def test_minimal_install_is_enough_to_import_the_package():
    runtimes = {'torch', 'onnx', 'onnxruntime', 'openvino', 'tensorrt', 'tensorrt_rtx'}
    tools = {'matplotlib', 'PIL', 'skimage', 'scipy', 'rosbags', 'tensorboard', 'rclpy'}
    result = import_without(runtimes | tools, ['kp2d_core', 'kp2d_core.cli', 'kp2d_core.runtimes'])
    assert result.returncode == 0, result.stderr


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split('.')[0])
    return names


def test_package_xml_declares_every_import_of_the_nodes():
    sources = [*(ROOT / 'kp2d_ros').rglob('*.py'), *(ROOT / 'launch').rglob('*.py')]
    declared = {
        element.text for element in ElementTree.parse(ROOT / 'package.xml').iter('exec_depend')
    }
    rosdep_names = {
        'cv2': 'python3-opencv',
        'numpy': 'python3-numpy',
        'tqdm': 'python3-tqdm',
        'yaml': 'python3-yaml',
    }
    imported = set().union(*(imported_names(path) for path in sources))
    outside = imported - set(sys.stdlib_module_names) - {'kp2d_core', 'kp2d_ros'}
    outside -= {'rosbags'}  # for bags alone, and a pip key, which rosdep refuses on new systems
    outside -= {'PIL'}  # for kp2d_ros.demo.film alone, which no robot runs
    outside -= {'image_transport_py'}  # for plugins, where it is installed; Humble has none
    undeclared = {rosdep_names.get(name, name) for name in outside} - declared
    assert not undeclared


def test_evo_is_for_tests_only():
    """It is GPL, which our licence is not."""
    for package in ('kp2d_core', 'kp2d_ros'):
        for path in (ROOT / package).rglob('*.py'):
            assert 'evo' not in imported_names(path), path
