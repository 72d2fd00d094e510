"""The Python code in README.md and docs/python.md runs."""

import re

import numpy as np
from conftest import ROOT

import kp2d_core
from kp2d_core.visualize import write_image


def snippets(path: str) -> list[str]:
    return re.findall(r'```python\n(.*?)```', (ROOT / path).read_text(), re.DOTALL)


def test_readme(photographs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = photographs['coffee'][:240, :320]
    write_image('first.jpg', image)
    write_image('second.jpg', image[8:, 8:])
    (code,) = snippets('README.md')
    names: dict[str, object] = {}
    exec(code, names)
    assert np.asarray(names['points0']).shape[0] > 100


def test_python(photographs):
    first, second = photographs['coffee'][:240, :320], photographs['coffee'][5:245, 5:325]
    names = {name: getattr(kp2d_core, name) for name in kp2d_core.__all__}
    names |= {'image': first, 'images': [first, second]}
    names |= {'first_image': first, 'second_image': second}
    detect, *others = snippets('docs/python.md')
    exec(detect, names)
    names['first'], names['second'] = names['detector'].detect([first, second])
    for code in others:
        exec(code, names)
    moved = np.median(names['points1'] - names['points0'], axis=0)
    assert np.abs(moved + 5).max() < 0.1
    assert names['old'].sum() > 100
