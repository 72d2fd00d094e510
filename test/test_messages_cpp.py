"""The C++ example of docs/messages.md, compiled and run on the bytes of real messages."""

import cpp
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

PRINT = """
void track(uint32_t id, float x, float y, const int8_t * descriptor, size_t length)
{
  std::printf("%u %.9g %.9g %zu %d\\n", id, x, y, length, descriptor[length - 1]);
}
void add(float x0, float y0, float x1, float y1)
{
  std::printf("%.9g %.9g %.9g %.9g\\n", x0, y0, x1, y1);
}
"""


@cpp.needs_compiler
def test_example_reads_what_we_write(tmp_path):
    example = (ROOT / 'docs' / 'messages.md').read_text().split('```cpp\n')[1].split('```')[0]
    headers = ''.join(line + '\n' for line in example.splitlines() if line.startswith('#'))
    code = ''.join(line + '\n' for line in example.splitlines() if not line.startswith('#'))
    program = cpp.build(headers + PRINT + code, tmp_path)

    features, tracks = some_features(), some_tracks()
    cloud = keypoints_cloud(features, tracks, descriptor_format='int8')
    found = cpp.run(program, 'keypoints', cloud, tmp_path)
    expected = np.column_stack([
        tracks.ids, features.keypoints, np.full(7, 16),
        np.clip(np.rint(320 * features.descriptors[:, -1]), -127, 127),
    ])  # fmt: skip
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))

    previous = some_features(seed=1)
    cloud = matches_to_cloud(header(), previous, features, some_rays(), tracks, 0)
    found = cpp.run(program, 'matches', cloud, tmp_path)
    before, now = tracks.matches.indices[tracks.matches.inliers].T
    expected = np.column_stack([previous.keypoints[before], features.keypoints[now]])
    np.testing.assert_array_equal(found.astype(np.float32), expected)
