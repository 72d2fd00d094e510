"""The live page in a real browser, and `make run` from the start to Ctrl-C."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from importlib.util import find_spec

import cv2
import numpy as np
import pytest
from chromium import BROWSER, Chromium
from models import write_responsive_model

pytest.importorskip('rclpy')

from robot import PATIENCE, Process, Robot, image_message, new_domain
from sensor_msgs.msg import Image

from kp2d_ros.demo.live_page import MOST_READERS, LivePage
from kp2d_ros.overlay import to_jpeg


@pytest.fixture
def page():
    page = LivePage()
    yield page
    page.close()


def get(page: LivePage, path: str) -> bytes:
    with urllib.request.urlopen(page.address + path, timeout=10) as answer:
        return answer.read()


def colour(red: int, green: int, blue: int) -> bytes:
    return to_jpeg(np.full((48, 64, 3), (red, green, blue), np.uint8))


def test_answers(page):
    assert b'<title>kp2d' in get(page, '')
    assert json.loads(get(page, 'figures.json')) == {'frames shown': 0}
    page.tell({'rate': '12 Hz'})
    page.show(colour(255, 0, 0))
    assert json.loads(get(page, 'figures.json')) == {'rate': '12 Hz', 'frames shown': 1}
    image = cv2.imdecode(np.frombuffer(get(page, 'frame.jpg'), np.uint8), cv2.IMREAD_COLOR)
    assert image.shape == (48, 64, 3)
    for path in ('../etc/passwd', 'nothing', 'config/live_page.html'):
        with pytest.raises(urllib.error.HTTPError, match='404'):
            get(page, path)


def test_it_is_on_loopback_only(page):
    assert page.address.startswith('http://127.0.0.1:')


def test_a_port_that_cannot_be_had(page):
    for port in (int(page.address.split(':')[2].strip('/')), 70_000):
        with pytest.raises(ValueError, match=f'port {port} cannot be used, 0 is any free one'):
            LivePage(port)


def ask(page: LivePage, request: bytes) -> bytes:
    """The beginning of the answer to these very bytes."""
    with socket.create_connection(('127.0.0.1', port_of(page)), 10) as connection:
        connection.sendall(request)
        answer = connection.makefile('rb')
        return b''.join(line for line, _ in zip(answer, range(12), strict=False))


def port_of(page: LivePage) -> int:
    return int(page.address.split(':')[2].strip('/'))


@pytest.mark.parametrize(
    ('host', 'code'),
    [
        ('127.0.0.1:8000', 200),
        ('localhost', 200),
        ('LOCALHOST:9000', 200),  # ssh -L 9000:localhost:8000
        ('[::1]:8000', 200),
        ('evil.example', 403),
        ('evil.example:8000', 403),
        ('127.0.0.1.evil.example', 403),
        ('localhost@evil.example', 403),
        ('', 403),
        ('[::1', 400),
    ],
)
def test_only_the_names_of_this_machine_are_answered(page, host, code):
    """Else any page could read it, under a name of its own that leads here (DNS rebinding)."""
    page.show(colour(0, 255, 0))
    for path in ('/', '/figures.json', '/frame.jpg'):
        answer = ask(page, f'GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n'.encode())
        assert answer.startswith(f'HTTP/1.0 {code} '.encode())


@pytest.mark.parametrize(
    ('request_', 'code'),
    [
        (b'GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n', 400),
        (b'GET http://[::1/ HTTP/1.0\r\n\r\n', 400),
        (b'GET / HTTP/1.0\r\n\r\n', 200),
        (b'GET /' + b'a' * 70_000 + b' HTTP/1.1\r\n\r\n', 414),
        (b'GET / HTTP/9.9\r\n\r\n', 505),
        (b'\x00\xff\r\n\r\n', 400),
        (b'POST / HTTP/1.1\r\nHost: localhost\r\n\r\n', 404),
        (b'PUT / HTTP/1.1\r\nHost: localhost\r\n\r\n', 501),
        (b'GET / HTTP/1.1\r\n' + b'A: b\r\n' * 200 + b'\r\n', 431),
    ],
    ids=range(9),
)
def test_odd_requests_are_answered(page, request_, code):
    assert str(code).encode() in ask(page, request_)


def token_of(page: LivePage) -> str:
    return get(page, '').decode().split('name="token" content="')[1].split('"')[0]


def post(page: LivePage, body: bytes, token: str, host: str = 'localhost') -> int:
    head = f'POST /parameters HTTP/1.1\r\nHost: {host}\r\nX-Token: {token}\r\n'
    sent = f'{head}Content-Length: {len(body)}\r\n\r\n'.encode() + body
    return int(ask(page, sent).split()[1])


def test_only_the_page_itself_changes_parameters(page):
    token, change = token_of(page), b'{"name": "nms_radius", "value": 4}'
    other = LivePage()
    assert len(token) > 16 and token != token_of(other)
    other.close()
    assert post(page, change, '') == post(page, change, 'TOKEN') == 403
    assert post(page, change, token, host='evil.example') == 403
    assert post(page, b'x' * 5000, token) == 413
    wild = [b'{"name": "nms_radius", "value": %s}' % v for v in (b'NaN', b'1e400', b'9' * 400)]
    for bad in (b'', b'[]', b'{"name": 3}', b'{"value": 3}', b'[' * 900, b'\xff', *wild):
        assert post(page, bad, token) == 400
    assert page.changes() == []
    assert post(page, change, token) == 202
    assert page.changes() == [('nms_radius', 4.0)] and page.changes() == []


def test_idle_readers_hold_nothing_for_ever(monkeypatch):
    monkeypatch.setattr('kp2d_ros.demo.live_page.IDLE', 0.3)
    impatient = LivePage()
    before = threading.active_count()
    idle = [socket.create_connection(('127.0.0.1', port_of(impatient)), 10) for _ in range(100)]
    time.sleep(0.1)
    assert threading.active_count() - before <= MOST_READERS
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before
    for connection in idle:
        assert connection.recv(1) == b''
        connection.close()
    assert b'<title>kp2d' in get(impatient, '')
    impatient.close()


def test_streams_end_when_it_closes():
    page = LivePage()
    page.show(colour(0, 0, 255))
    stream = urllib.request.urlopen(page.address + 'stream', timeout=10)
    assert stream.readline().startswith(b'--kp2d-frame')
    began = time.monotonic()
    page.close()
    stream.read()
    assert time.monotonic() - began < 5
    with pytest.raises(OSError):
        urllib.request.urlopen(page.address, timeout=2)


@pytest.mark.skipif(BROWSER is None, reason='no Chromium is installed, and no package brings one')
def test_in_a_browser(page, tmp_path):
    """The stream is drawn and goes on, the figures follow, the end is noticed."""
    stop = threading.Event()

    def play():
        for number in range(10_000):
            if stop.wait(0.1):
                return
            page.show(colour(0, 255, 0) if number % 2 else colour(255, 0, 0))
            slider = {'name': 'nms_radius', 'value': 3, 'low': 0, 'high': 9, 'step': 0.5}
            page.tell({
                'state': '10.0 Hz', 'keypoints': str(number), 'history': [[9.5, None], [10, 31.5]],
                'parameters': [{**slider, 'text': 'words'}], 'level': 'warn',
                'path': [[0, 0], [1, 2]],
            })  # fmt: skip

    player = threading.Thread(target=play, daemon=True)
    with Chromium(tmp_path) as browser:
        browser.open(page.address)
        browser.wait("document.getElementById('state')?.textContent.includes('first frame')")
        player.start()
        image = "document.getElementById('stream')"
        browser.wait(f'{image}.naturalWidth === 64')
        browser.wait("document.getElementById('state').textContent === '10.0 Hz'")
        seen = browser.evaluate("document.getElementById('figures').innerText")
        assert 'keypoints' in seen
        browser.wait(f"document.getElementById('figures').innerText !== {json.dumps(seen)}")
        assert browser.evaluate("document.getElementById('latency').innerText").startswith('31.5')
        assert browser.evaluate("document.getElementById('state').dataset.level") == 'warn'
        assert browser.evaluate("document.querySelectorAll('polyline').length") == 3
        browser.evaluate(
            "(() => { const s = document.getElementById('set-nms_radius'); s.value = 5.5;"
            " s.dispatchEvent(new Event('change')); })()"
        )
        end = time.monotonic() + 20
        while not (asked := page.changes()):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert asked == [('nms_radius', 5.5)]
        # The pixels themselves: both colours of the stream come by.
        pixel = (
            '(() => { const c = document.createElement("canvas").getContext("2d");'
            f' c.drawImage({image}, 0, 0); return [...c.getImageData(9, 9, 1, 1).data]; }})()'
        )
        colours = set()
        end = time.monotonic() + 20
        while len(colours) < 2 and time.monotonic() < end:
            red, green, _, _ = browser.evaluate(pixel)
            colours.add('red' if red > green else 'green')
        assert colours == {'red', 'green'}
        stop.set()
        player.join(5)
        page.close()
        browser.wait("document.getElementById('state').textContent.includes('ended')")
        assert all('ERR_' in complaint for complaint in browser.complaints)  # only of the end


def change(address: str, name: str, value: float) -> int:
    with urllib.request.urlopen(address, timeout=10) as answer:
        token = answer.read().decode().split('name="token" content="')[1].split('"')[0]
    request = urllib.request.Request(
        address + 'parameters', json.dumps({'name': name, 'value': value}).encode(),
        {'X-Token': token},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.status


def test_run_from_start_to_interrupt(tmp_path):
    """Camera and node as processes; lines, overlays, the page; then all of it ends, soon."""
    model = write_responsive_model(tmp_path)
    out = tmp_path / 'out'
    with Process(
        tmp_path / 'log', '-m', 'kp2d_ros.demo.run', '--out', str(out), '--model', str(model),
        '--runtime', 'torch', '--size', '160x120', '--rate', '10', '--no-browser',
        domain=new_domain(),
    ) as run:  # fmt: skip
        run.wait_for('live page: http://127.0.0.1:')
        address = run.output.split('live page: ')[1].split()[0]
        run.wait_for(' keypoints   ')
        end = time.monotonic() + PATIENCE
        while not list(out.glob('overlay-*.jpg')):
            assert time.monotonic() < end
            time.sleep(0.1)
        overlay = cv2.imread(str(next(iter(sorted(out.glob('overlay-*.jpg'))))))
        assert overlay.shape == (240, 320, 3)  # small ones are doubled
        with urllib.request.urlopen(address + 'figures.json', timeout=10) as answer:
            figures = json.load(answer)
        assert figures['frames shown'] > 0
        # The node reports its runtime a second after its first frame.
        while not (figures.get('parameters') and figures['runtime'].startswith('torch')):
            assert time.monotonic() < end
            time.sleep(0.2)
            with urllib.request.urlopen(address + 'figures.json', timeout=10) as answer:
                figures = json.load(answer)
        assert change(address, 'max_keypoints', 150) == 202  # as a slider does
        while {p['name']: p['value'] for p in figures['parameters']}['max_keypoints'] != 150:
            assert time.monotonic() < end
            time.sleep(0.2)
            with urllib.request.urlopen(address + 'figures.json', timeout=10) as answer:
                figures = json.load(answer)
        assert figures['history'] and figures['level'] in ('ok', 'warn')
        if BROWSER is not None:
            with Chromium(tmp_path / 'profile') as browser:
                browser.open(address)
                browser.wait("document.getElementById('stream')?.naturalWidth === 320")
                browser.wait("document.getElementById('figures').innerText.includes('Hz')")
        children = subprocess.run(
            ['ps', '-o', 'pid=', '--ppid', str(run.process.pid)], capture_output=True, text=True
        ).stdout.split()
        odometry = find_spec('nav_msgs') is not None
        assert len(children) == 2 + odometry
        assert (out / 'odometry_node.log').exists() == odometry
        code, seconds = run.stop(signal.SIGINT)
        assert code == 0 and seconds < 5
        assert not any(
            subprocess.run(['ps', '-p', pid], capture_output=True).returncode == 0
            for pid in children
        )
        assert 'Traceback' not in run.output
        for log in out.glob('*.log'):
            assert 'Traceback' not in log.read_text()


def test_run_names_what_is_wrong_with_the_pictures(tmp_path):
    (tmp_path / 'black').mkdir()
    for number in range(3):
        cv2.imwrite(str(tmp_path / 'black' / f'{number}.png'), np.zeros((120, 160, 3), np.uint8))
    model = write_responsive_model(tmp_path)
    with Process(
        tmp_path / 'log', '-m', 'kp2d_ros.demo.run', '--source', str(tmp_path / 'black'),
        '--out', str(tmp_path / 'out'), '--model', str(model), '--runtime', 'torch', '--rate',
        '5', '--no-browser', domain=new_domain(),
    ) as run:  # fmt: skip
        run.wait_for('warn: the images are black: check the lens cap')
        time.sleep(2.5)
        assert run.output.count('warn: the images are black') == 1  # once, not every second


def test_run_with_the_camera_of_a_robot_until_the_terminal_is_closed(tmp_path, photographs):
    domain = new_domain()
    robot = Robot(domain)
    picture = cv2.resize(photographs['coffee'], (160, 120))
    try:
        with Process(
            tmp_path / 'log', '-m', 'kp2d_ros.demo.run', '--out', str(tmp_path / 'out'),
            '--no-browser',
            '--model', str(write_responsive_model(tmp_path)), '--runtime', 'torch',
            '--topic', '/front/image_raw', domain=domain,
        ) as run:  # fmt: skip
            run.wait_for('live page: ')
            images = robot.publisher(Image, '/front/image_raw')

            began = time.monotonic()

            def latencies() -> list[str]:
                # Stamped in the time of a simulation.
                images.publish(image_message(picture, 1 + time.monotonic() - began))
                return re.findall(r'latency ([\d.]+) ms \(p95 ([\d.]+) ms\)', run.output)

            median, p95 = map(float, robot.wait(latencies, 'keypoints of its images')[0])
            assert 0 < median <= p95 < PATIENCE * 1e3
            assert ' keypoints   ' in run.output
            assert robot.node.count_subscribers('/front/camera_info') == 1
            code, seconds = run.stop(signal.SIGHUP)
            assert code == 0 and seconds < 5
            assert not (tmp_path / 'out' / 'camera_node.log').exists()
    finally:
        robot.close()


def test_run_says_why_it_cannot(tmp_path):
    with Process(
        tmp_path / 'log', '-m', 'kp2d_ros.demo.run', '--out', str(tmp_path),
        '--source', '/nowhere',
        '--model', str(tmp_path / 'absent'), '--no-browser', domain=new_domain(),
    ) as run:  # fmt: skip
        assert run.process.wait(60) == 1
        assert 'there is no' in run.output and 'Traceback' not in run.output


def test_run_names_a_port_in_use(tmp_path, page):
    port = page.address.split(':')[2].strip('/')
    with Process(
        tmp_path / 'log', '-m', 'kp2d_ros.demo.run', '--out', str(tmp_path / 'out'),
        '--port', port,
        '--no-browser', domain=new_domain(),
    ) as run:  # fmt: skip
        assert run.process.wait(60) == 2
        assert f'port {port} cannot be used' in run.output and 'Traceback' not in run.output
        assert not list((tmp_path / 'out').iterdir())  # nothing was started for it


def test_run_has_help():
    done = subprocess.run(
        [sys.executable, '-m', 'kp2d_ros.demo.run', '--help'], capture_output=True, text=True,
        timeout=60, env={**os.environ, 'COLUMNS': '100'},
    )  # fmt: skip
    assert done.returncode == 0
    for word in ('--source', '--topic', 'webcam', '--once'):
        assert word in done.stdout
