"""Shared fixtures: the photographs of scikit-image, and optional data."""

import os
from pathlib import Path

# OpenMP reads this when torch is loaded, here and in the processes that tests start: waiting
# threads sleep. If they spin, two busy processes on two cores slow each other down tenfold.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

import cv2
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
# These are in every wheel of scikit-image, so nothing is downloaded.
PHOTOGRAPHS = (
    'astronaut.png',
    'chelsea.png',
    'coffee.png',
    'hubble_deep_field.jpg',
    'motorcycle_left.png',
    'motorcycle_right.png',
    'rocket.jpg',
)


# Packages that a robot may lack: `colcon test` skips the tests that need them.
OPTIONAL = {
    'catkin_pkg', 'colcon_core', 'h5py', 'launch_ros', 'matplotlib', 'onnx', 'onnxruntime',
    'openvino', 'PIL', 'psutil', 'pycolmap', 'rclpy', 'rosbags', 'safetensors', 'scipy', 'skimage',
    'tensorboard', 'tensorrt_rtx', 'torch', 'yacs',
}  # fmt: skip


def lacking(error: BaseException | None) -> str:
    """Return the optional package that is missing according to the error, or ''."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition('.')[0]
            return package if package in OPTIONAL else ''
        if isinstance(error, ValueError) and 'not installed: pip install' in str(error):
            return str(error).rpartition('pip install ')[2].split()[0]
        error = error.__cause__ or error.__context__
    return ''


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """Skip a file that cannot be imported without an optional package."""
    report = (yield).get_result()
    call = getattr(report, 'call', None)
    if report.failed and call is not None and (package := lacking(call.excinfo.value.__cause__)):
        report.outcome = 'skipped'
        report.longrepr = (str(collector.path), 0, f'Skipped: {package} is not installed')


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed and call.excinfo is not None and (package := lacking(call.excinfo.value)):
        report.outcome = 'skipped'
        report.longrepr = (str(item.path), 0, f'Skipped: {package} is not installed')


@pytest.fixture(scope='session')
def photographs() -> dict[str, np.ndarray]:
    """Name without suffix -> RGB uint8. The two motorcycles are a stereo pair."""
    import skimage.data

    directory = Path(skimage.data.__file__).parent
    images = {Path(name).stem: cv2.imread(str(directory / name)) for name in PHOTOGRAPHS}
    return {name: cv2.cvtColor(image, cv2.COLOR_BGR2RGB) for name, image in images.items()}


@pytest.fixture(scope='session')
def shared_data() -> Path:
    """The folder of optional larger data; skip the test without it."""
    directory = Path(os.environ.get('KP2D_DATA', ROOT.parent / 'shared' / 'data'))
    if not directory.is_dir():
        pytest.skip(f'no data in {directory}; set KP2D_DATA to where it is')
    return directory


@pytest.fixture(scope='session', autouse=True)
def own_cache(tmp_path_factory):
    """Use a temporary cache for compiled networks instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
        yield


# For tests of nodes.


@pytest.fixture(scope='session')
def model(tmp_path_factory) -> Path:
    """A small, fast model whose keypoints follow the image."""
    from models import write_responsive_model

    return write_responsive_model(tmp_path_factory.mktemp('model'))


@pytest.fixture(scope='session')
def picture(photographs) -> np.ndarray:
    return np.ascontiguousarray(photographs['coffee'][:120, :160])


@pytest.fixture
def domain() -> int:
    """A ROS domain that nobody else uses."""
    from robot import new_domain

    return new_domain()


@pytest.fixture
def robot(domain):
    from robot import Robot

    robot = Robot(domain)
    yield robot
    robot.close()
