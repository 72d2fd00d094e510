"""kp2d evaluate as a user types it: tables, JSON, report, mistakes."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import cv2
import pytest
from models import write_random_model
from sequences import write_sequences

from kp2d_core.cli import main
from kp2d_core.evaluation.protocol import METRICS


@pytest.fixture(scope='module')
def data(tmp_path_factory, photographs):
    return str(write_sequences(tmp_path_factory.mktemp('data'), photographs))


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return str(write_random_model(tmp_path_factory.mktemp('models')))


def test_a_model_beside_baselines(data, model, tmp_path, capsys):
    out, report = tmp_path / 'out.json', tmp_path / 'report'
    arguments = ['evaluate', '--model', model, '--data', data, '--size', '160x120']
    arguments += ['--top-k', '300', '--seeds', '2', '--baselines', 'sift,orb']
    assert main([*arguments, '--json', str(out), '--html', str(report)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert list(results['methods']) == ['half-0', 'sift', 'orb']
    for name, method in results['methods'].items():
        assert set(method['splits']) == {'all', 'illumination', 'viewpoint'}
        for split in method['splits'].values():
            assert all(math.isfinite(split[metric]) for metric in METRICS)
        whole = method['splits']['all']
        assert whole['pairs'] == len(method['pairs']) == 5
        for metric in METRICS:
            rows = [pair[metric] for pair in method['pairs']]
            assert whole[metric] == pytest.approx(sum(rows) / len(rows))
            assert f'{whole[metric]:.3f}' in printed
        assert len(method['pairs'][0]['corner_errors']) == 2
        assert re.search(rf'{name}\s+{whole["repeatability"]:.3f}', printed)
    assert results['methods']['sift']['splits']['all']['mscore'] > 0.3
    assert (results['nms_radius'], results['truth']) == (3, 'exact')
    assert 'each place once, radius 3 px, exact truth' in printed
    known = results['methods']['half-0']['reliability']
    assert known['found_within'] == 1.5 and 'found again within 1.5 px' in printed
    assert len(known['found']) == len(known['points']) == 10 and sum(known['points']) > 1000
    assert all('reliability' not in results['methods'][name] for name in ('sift', 'orb'))
    check_report((report / 'index.html').read_text(), drawings=3 * 5)


def check_report(page, drawings):
    class Reader(HTMLParser):
        open_tags, images, links = [], [], []

        def handle_starttag(self, tag, attributes):
            if tag == 'img':
                self.images.append(dict(attributes)['src'])
            elif tag not in ('meta',):
                self.open_tags.append(tag)
            self.links += [value for name, value in attributes if name in ('href', 'src')]

        def handle_endtag(self, tag):
            assert self.open_tags.pop() == tag

    reader = Reader()
    reader.feed(page)
    assert not reader.open_tags
    assert all(link.startswith('data:') for link in reader.links)  # nothing is fetched
    assert sum(image.startswith('data:image/webp') for image in reader.images) == drawings
    assert sum(image.startswith('data:image/svg') for image in reader.images) >= 2


def test_two_commands_print_the_same_numbers(data, capsys):
    printed = []
    for _ in range(2):
        arguments = ['evaluate', '--model', 'none', '--baselines', 'orb', '--data', data]
        assert main([*arguments, '--seeds', '3']) == 0
        printed.append(capsys.readouterr().out.split('time per image')[0])
    assert printed[0] == printed[1]
    assert re.search(r'\d±\d', printed[0])


def test_several_models(data, model, tmp_path, capsys):
    other = str(write_random_model(tmp_path, seed=1))
    arguments = ['evaluate', '--model', model, '--model', other, '--data', data]
    assert main([*arguments, '--sequences', 'same', '--splits', 'each']) == 0
    printed = capsys.readouterr().out
    assert re.search(r'^i_same:', printed, re.MULTILINE)
    # The same image twice: any network that runs as it should finds the same points again.
    assert len(re.findall(r'half-[01] +1\.000 +0\.000 +1\.000 +1\.000 +1\.000', printed)) == 2


def test_tables_for_documents(data, capsys):
    arguments = ['evaluate', '--model', 'none', '--baselines', 'orb', 'sift', '--data', data]
    assert main([*arguments, '--splits', 'all', '--paper', 'none']) == 0
    plain = capsys.readouterr().out
    assert main([*arguments, '--splits', 'all', '--paper', 'none', '--markdown']) == 0
    title, _, head, line, *rows = capsys.readouterr().out.strip().splitlines()
    assert title in plain and head.startswith('|  | Repeat. | Loc. | Cor-1 |')
    assert line.count('---') == head.count('|') - 1
    for row in rows:
        figures = [cell.strip() for cell in row.strip('|').split('|')]
        assert re.search(r' +'.join(map(re.escape, figures)), plain)
    assert len(rows) == 2


def test_scales_are_named_beside_the_model(data, model, capsys):
    arguments = ['evaluate', '--model', model, '--data', data, '--sequences', 'same']
    assert main([*arguments, '--splits', 'all', '--scales', '1.5,1']) == 0
    printed = capsys.readouterr().out
    assert re.search(r'half-0 at 1\.5x\+1x +1\.000 +0\.000 +1\.000', printed)


def test_the_papers_protocol_counts_copies_and_says_so(data, capsys, tmp_path):
    arguments = ['evaluate', '--model', 'none', '--baselines', 'orb', '--data', data]
    protocols = {
        'paper': ['--nms-radius', '0'],
        'exact': ['--nms-radius', '0', '--truth', 'exact'],
        'once': ['--nms-radius', '4'],
    }
    figures, printed = {}, {}
    for name, options in protocols.items():
        out = tmp_path / f'{name}.json'
        assert main([*arguments, *options, '--splits', 'all', '--json', str(out)]) == 0
        printed[name] = capsys.readouterr().out
        figures[name] = json.loads(out.read_text())['methods']['orb']['splits']['all']
    assert "300 points, the paper's protocol: copies count" in printed['paper']
    assert 'copies count, exact truth' in printed['exact']
    assert 'each place once, radius 4 px, exact truth' in printed['once']
    assert re.search(r"paper's ORB, by its protocol +0\.532", printed['once'])
    # ORB finds places again at several of its scales.
    assert figures['paper']['copies'] == figures['once']['copies'] > 0.2
    assert figures['once']['repeatability'] < figures['exact']['repeatability'] - 0.02
    assert figures['paper'] != figures['exact']


def test_refined_matches_have_a_row_of_their_own(data, capsys, tmp_path):
    arguments = ['evaluate', '--model', 'none', '--baselines', 'orb', '--data', data, '--refine']
    out, report = tmp_path / 'out.json', tmp_path / 'report'
    assert main([*arguments, '--json', str(out), '--html', str(report)]) == 0
    printed = capsys.readouterr().out
    methods = json.loads(out.read_text())['methods']
    assert list(methods) == ['orb', 'orb refined']
    plain, refined = (method['splits']['viewpoint'] for method in methods.values())
    assert refined['error'] < plain['error'] and refined['precision'] > plain['precision']
    assert re.search(rf'orb refined .* {refined["error"]:.3f} ', printed)
    assert 'orb refined' in (report / 'index.html').read_text()


def test_the_papers_rows_stand_beside_a_sequence_of_its_name(data, tmp_path, capsys):
    (tmp_path / 'v_bark').symlink_to(f'{data}/v_astronaut')
    arguments = ['evaluate', '--model', 'none', '--baselines', 'sift', '--data', str(tmp_path)]
    assert main([*arguments, '--splits', 'bark']) == 0
    printed = capsys.readouterr().out
    assert re.search(r"paper's SIFT, by its protocol +0\.470 +1\.252 +0\.600±0\.000", printed)
    assert main([*arguments, '--splits', 'bark', '--paper', 'none']) == 0
    assert 'paper' not in capsys.readouterr().out


def test_further_tests_need_photographs_only(tmp_path, photographs, capsys):
    for name in ('astronaut', 'coffee', 'rocket'):
        cv2.imwrite(str(tmp_path / f'{name}.png'), photographs[name][..., ::-1])
    out = tmp_path / 'out.json'
    arguments = ['evaluate', '--model', 'none', '--baselines', 'orb', '--size', '160x120']
    arguments += ['--shift', str(tmp_path), '--robustness', str(tmp_path / 'coffee.png')]
    assert main([*arguments, '--max-photos', '2', '--json', str(out),
                 '--html', str(tmp_path / 'report')]) == 0  # fmt: skip
    printed = capsys.readouterr().out
    assert 'shift test' in printed and 'rotation' in printed
    orb = json.loads(out.read_text())['methods']['orb']
    assert [row['shift'] for row in orb['shift']] == list(range(9))
    assert orb['robustness']['rotation'][0]['mscore'] == 1
    check_report((tmp_path / 'report' / 'index.html').read_text(), drawings=0)


def test_what_is_skipped_is_said(photographs, tmp_path, capsys):
    folder = write_sequences(tmp_path, photographs)
    (folder / 'i_coffee' / 'H_1_3').unlink()
    arguments = ['evaluate', '--model', 'none', '--baselines', 'orb', '--data', str(folder)]
    assert main([*arguments, '--json', str(tmp_path / 'out.json')]) == 0
    assert 'H_1_3 is missing' in capsys.readouterr().err
    assert 'H_1_3 is missing' in json.loads((tmp_path / 'out.json').read_text())['skipped'][0]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([], 'give --data'),
        (['--data', 'nowhere'], 'there is no folder nowhere'),
        (['--data', 'DATA', '--model', 'none'], 'nothing to evaluate'),
        (['--data', 'DATA', '--model', 'missing.safetensors'], "no model 'missing.safetensors'"),
        (['--data', 'DATA', '--model', 'none', '--baselines', 'surf'], "no baseline 'surf'"),
        (['--data', 'DATA', '--model', 'none', '--baselines', 'orb', 'orb'], 'orb is given twice'),
        (['--data', 'DATA', '--sequences', 'boat'], "no sequence 'boat'"),
        (['--data', 'DATA', '--splits', 'winter'], "no split 'winter'"),
        (['--data', 'DATA', '--json', 'DATA'], '--json must be a file'),
        (['--shift', 'DATA/i_same/1.png', '--markdown'], '--markdown prints the tables of --data'),
        (['--data', 'DATA', '--html', 'DATA/i_same/1.png'], '--html must be a folder'),
    ],
)
def test_mistakes(arguments, message, data, capsys):
    arguments = [argument.replace('DATA', data) for argument in arguments]
    assert main(['evaluate', *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and 'Traceback' not in error


def test_an_exported_model_has_its_own_size(data, model, tmp_path, capsys):
    exported = str(tmp_path / 'exported.onnx')
    assert main(['export', model, '-o', exported, '--size', '160x120', '--top-k', '300']) == 0
    arguments = ['evaluate', '--model', exported, model, '--data', data, '--sequences', 'coffee']
    assert main(arguments) == 2
    assert 'evaluate it with --size 160x120' in capsys.readouterr().err
    assert main([*arguments, '--size', '160x120', '--scales', '2,1']) == 2
    assert 'it has no other scales' in capsys.readouterr().err
    out = tmp_path / 'out.json'
    assert main([*arguments, '--size', '160x120', '--json', str(out)]) == 0
    methods = json.loads(out.read_text())['methods']
    ours, its = (method['splits']['all'] for method in methods.values())
    for metric in ('repeatability', 'localization', 'mscore'):
        assert ours[metric] == pytest.approx(its[metric], abs=0.02)
