"""One ROS 2 package, two import packages, and both of their names in the ament index."""

import re
from pathlib import Path

from setuptools import find_packages, setup

PACKAGES = ('kp2d_core', 'kp2d_ros')
ROOT = Path(__file__).parent


def version() -> str:
    source = (ROOT / 'kp2d_core' / 'version.py').read_text(encoding='utf-8')
    return re.search(r"__version__ = '(.+)'", source).group(1)


def files_below(directory: str) -> list[Path]:
    found = sorted(path for path in (ROOT / directory).rglob('*') if path.is_file())
    return [path.relative_to(ROOT) for path in found if '__pycache__' not in path.parts]


def package_data(package: str) -> list[str]:
    """List all files of an import package that are not Python: weights, data, py.typed."""
    found = [path for path in files_below(package) if path.suffix not in ('.py', '.pyc')]
    return [str(path.relative_to(package)) for path in found]


def data_files() -> list[tuple[str, list[str]]]:
    """List (directory under the prefix, files) that ROS 2 needs."""
    targets = {'share/ament_index/resource_index/packages': [f'resource/{p}' for p in PACKAGES]}
    for package in PACKAGES:
        targets[f'share/{package}'] = ['package.xml']
        # The executables of `ros2 run` are links to two scripts, one for commands and one for
        # nodes. They are not entry points, whose shebang would name the Python of the build
        # instead of that of the active environment.
        targets[f'lib/{package}'] = [str(path) for path in files_below(f'lib/{package}')]
    for path in [*files_below('launch'), *files_below('config'), *files_below('integrations')]:
        targets.setdefault(f'share/kp2d_ros/{path.parent}', []).append(str(path))
    return list(targets.items())


# ROS is not a requirement: a distribution has its own, and pip must not shadow it. Neither is
# OpenCV: pip does not see the one of apt or JetPack, and would install another in front of it,
# with a NumPy that breaks cv_bridge of the distribution.
REQUIRED = ['numpy>=1.21', 'PyYAML>=5.4', 'safetensors>=0.4', 'tqdm>=4.57']
EXTRAS = {
    # Everything to run a model on a machine without ROS; `kp2d` (packaging/kp2d) installs it.
    'run': ['opencv-contrib-python-headless>=4.8', 'openvino>=2024.4', 'onnx>=1.16'],
    'opencv': ['opencv-contrib-python-headless>=4.8'],
    'onnxruntime': ['onnxruntime>=1.16'],
    'openvino': ['openvino>=2024.4'],
    'tensorrt': ['tensorrt>=10.3,<12', 'cuda-python>=12'],
    'export': ['onnx>=1.16', 'onnxruntime>=1.16'],
    'bags': ['rosbags>=0.10'],
    # Features and matches for hloc and COLMAP.
    'slam': ['h5py>=3.8', 'pycolmap>=4.2'],
    'eval': ['matplotlib>=3.7', 'pillow>=10', 'jinja2>=3.0'],
    'train': ['torch>=2.4', 'tensorboard>=2.14', 'matplotlib>=3.7', 'pillow>=10', 'rosbags>=0.10'],
    # For machines without a ROS distribution (x86_64 Linux only).
    'ros': [
        'ros-jazzy-rclpy[fastrtps]~=7.1',
        'ros-sensor-msgs~=5.3',
        'ros-diagnostic-msgs~=5.3',
        'ros-std-srvs~=5.3',
        'ros-nav-msgs~=5.3',
    ],
    'test': ['pytest', 'pytest-timeout'],  # makes `colcon test` run pytest
    'dev': [
        'pytest',
        'pytest-cov',
        'pytest-timeout',
        'hypothesis',
        'ruff',
        'mypy',
        'scikit-image',
        'yacs',
    ],
}

setup(
    name='kp2d_ros',
    version=version(),
    description='Learned keypoints for ROS 2: train, evaluate, export, run',
    author='The kp2d_ros authors',
    license='MIT',
    python_requires='>=3.10',
    packages=find_packages(include=[pattern for p in PACKAGES for pattern in (p, f'{p}.*')]),
    package_data={package: package_data(package) for package in PACKAGES},
    data_files=data_files(),
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={'console_scripts': ['kp2d = kp2d_core.cli:main']},
    zip_safe=False,
)
