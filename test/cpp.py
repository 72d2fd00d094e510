"""Compile C++ functions that read clouds, and run them on the bytes of a message."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

COMPILER = shutil.which('g++')
needs_compiler = pytest.mark.skipif(COMPILER is None, reason='g++ is not installed')

INCLUDES = """
#include <cstdio>
#include <fstream>
#include <iterator>
"""
# Needs on_keypoints(cloud) and on_matches(cloud), which print a line per point.
MAIN = """
int main(int, char ** arguments)
{
  sensor_msgs::msg::PointCloud2 cloud;
  std::ifstream layout(arguments[2]);
  sensor_msgs::msg::PointField field;
  int datatype;
  layout >> cloud.width >> cloud.point_step;
  while (layout >> field.name >> field.offset >> datatype >> field.count) {
    field.datatype = datatype;
    cloud.fields.push_back(field);
  }
  cloud.height = 1;
  cloud.row_step = cloud.width * cloud.point_step;
  std::ifstream bytes(arguments[3], std::ios::binary);
  cloud.data.assign(std::istreambuf_iterator<char>(bytes), {});
  if (arguments[1][0] == 'k') {on_keypoints(cloud);} else {on_matches(cloud);}
}
"""


def build(code: str, folder: Path, *includes: Path) -> Path:
    """Compile the functions with `MAIN`; skip the test without the headers of sensor_msgs."""
    folders = _headers()
    if not folders:
        pytest.skip('the C++ headers of sensor_msgs are not installed')
    source, program = folder / 'main.cpp', folder / 'program'
    source.write_text(INCLUDES + code + MAIN)
    built = subprocess.run(
        [COMPILER, '-std=c++17', '-Wall', '-o', program, source]
        + [f'-isystem{path}' for path in [*includes, *folders]],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0 and 'warning' not in built.stderr, built.stderr
    return program


def run(program: Path, kind: str, cloud, folder: Path) -> np.ndarray:
    """Give a cloud to on_keypoints or on_matches; return the numbers that it prints."""
    layout = [f'{cloud.width} {cloud.point_step}']
    layout += [f'{f.name} {f.offset} {f.datatype} {f.count}' for f in cloud.fields]
    (folder / 'layout').write_text('\n'.join(layout))
    (folder / 'bytes').write_bytes(bytes(cloud.data))
    done = subprocess.run(
        [program, kind, folder / 'layout', folder / 'bytes'], capture_output=True, text=True,
        timeout=30, check=True,
    )  # fmt: skip
    return np.array([line.split() for line in done.stdout.splitlines()], np.float64)


def _headers() -> list[Path]:
    """Find the C++ headers of the messages: next to the wheels, or of a ROS distribution."""
    import sensor_msgs

    for prefix in (Path(sys.prefix), Path(sensor_msgs.__file__).parents[4]):
        if (prefix / 'include' / 'sensor_msgs').is_dir():
            return sorted(path for path in (prefix / 'include').iterdir() if path.is_dir())
    return []
