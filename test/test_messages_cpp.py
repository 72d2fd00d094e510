"""The C++ example of docs/messages.md, compiled and run on the bytes of real messages."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

pytest.importorskip('sensor_msgs')

from test_messages import (
    header,
    keypoints_cloud,
    some_features,
    some_rays,
    some_tracks,
)

from kp2d_ros.messages import matches_to_cloud

COMPILER = shutil.which('g++')

PROGRAM = """
#include <cstdio>
#include <fstream>
#include <iterator>
void track(uint32_t id, float x, float y, const int8_t * descriptor, size_t length)
{
  std::printf("%u %.9g %.9g %zu %d\\n", id, x, y, length, descriptor[length - 1]);
}
void add(float x0, float y0, float x1, float y1)
{
  std::printf("%.9g %.9g %.9g %.9g\\n", x0, y0, x1, y1);
}
EXAMPLE
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


def include_folders() -> list[Path]:
    """Of the messages' C++ headers: beside the wheels, or of a ROS distribution."""
    import sensor_msgs

    prefixes = [Path(sys.prefix), Path(sensor_msgs.__file__).parents[4]]
    for prefix in prefixes:
        if (prefix / 'include' / 'sensor_msgs').is_dir():
            return sorted(path for path in (prefix / 'include').iterdir() if path.is_dir())
    return []


def run(program: Path, kind: str, cloud, folder: Path) -> np.ndarray:
    layout = [f'{cloud.width} {cloud.point_step}']
    layout += [f'{f.name} {f.offset} {f.datatype} {f.count}' for f in cloud.fields]
    (folder / 'layout').write_text('\n'.join(layout))
    (folder / 'bytes').write_bytes(bytes(cloud.data))
    done = subprocess.run(
        [program, kind, folder / 'layout', folder / 'bytes'], capture_output=True, text=True,
        timeout=30, check=True,
    )  # fmt: skip
    return np.array([line.split() for line in done.stdout.splitlines()], np.float64)


@pytest.mark.skipif(COMPILER is None, reason='g++ is not installed')
def test_example_reads_what_we_write(tmp_path):
    folders = include_folders()
    if not folders:
        pytest.skip('the C++ headers of sensor_msgs are not installed')
    example = (ROOT / 'docs' / 'messages.md').read_text().split('```cpp\n')[1].split('```')[0]
    headers = ''.join(line + '\n' for line in example.splitlines() if line.startswith('#'))
    code = ''.join(line + '\n' for line in example.splitlines() if not line.startswith('#'))
    source = tmp_path / 'example.cpp'
    source.write_text(headers + PROGRAM.replace('EXAMPLE', code))
    program = tmp_path / 'example'
    built = subprocess.run(
        [COMPILER, '-std=c++17', '-Wall', '-o', program, source]
        + [f'-isystem{folder}' for folder in folders],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert 'warning' not in built.stderr

    features, tracks = some_features(), some_tracks()
    found = run(
        program, 'keypoints', keypoints_cloud(features, tracks, descriptor_format='int8'), tmp_path
    )
    expected = np.column_stack([
        tracks.ids, features.keypoints, np.full(7, 16),
        np.clip(np.rint(320 * features.descriptors[:, -1]), -127, 127),
    ])  # fmt: skip
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))

    previous = some_features(seed=1)
    cloud = matches_to_cloud(header(), previous, features, some_rays(), tracks, 0)
    found = run(program, 'matches', cloud, tmp_path)
    before, now = tracks.matches.indices[tracks.matches.inliers].T
    expected = np.column_stack([previous.keypoints[before], features.keypoints[now]])
    np.testing.assert_array_equal(found.astype(np.float32), expected)
