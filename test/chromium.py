"""A headless Chromium for tests, driven through a pipe with its DevTools protocol."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BROWSER = next(
    (path for name in ('chromium', 'chromium-browser', 'google-chrome')
     if (path := shutil.which(name))), None
)  # fmt: skip


class Chromium:
    """One page in a browser, which ends with the `with` block."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        # The browser reads commands from descriptor 3 and answers on descriptor 4.
        command_read, self._commands = os.pipe()
        self._answers, answer_write = os.pipe()
        self._process = subprocess.Popen(
            [
                'bash', '-c',  # sh knows descriptors of one digit only
                f'exec "$0" "$@" 3<&{command_read} 4>&{answer_write}',
                BROWSER, '--headless=new', '--no-sandbox', '--disable-gpu',
                '--disable-dev-shm-usage', '--no-first-run', '--disable-extensions',
                '--remote-debugging-pipe', f'--user-data-dir={profile}', 'about:blank',
            ],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(command_read)
        os.close(answer_write)
        self._buffer = b''
        self._number = 0
        self.complaints: list[str] = []  # what the page wrote as errors
        targets = self._send('Target.getTargets')['targetInfos']
        page = next(target for target in targets if target['type'] == 'page')
        attached = self._send('Target.attachToTarget', targetId=page['targetId'], flatten=True)
        self._session = attached['sessionId']
        self._send('Runtime.enable')
        self._send('Log.enable')

    _session: str | None = None

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._commands)
        os.close(self._answers)

    def open(self, address: str) -> None:
        self._send('Page.navigate', url=address)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._send('Runtime.evaluate', expression=expression, returnByValue=True)
        return answer['result'].get('value')

    def wait(self, expression: str, timeout: float = 30.0) -> Any:
        """Wait until the expression is true."""
        end = time.monotonic() + timeout
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f'never true in the page: {expression}'
            time.sleep(0.1)
        return value

    def screenshot(self) -> str:
        """Return a PNG in base64."""
        return self._send('Page.captureScreenshot')['data']

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        command = {'id': self._number, 'method': method, 'params': parameters}
        if self._session is not None:
            command['sessionId'] = self._session
        os.write(self._commands, json.dumps(command).encode() + b'\0')
        while True:
            message = self._receive()
            if message.get('id') == self._number:
                assert 'error' not in message, message['error']
                return message['result']
            if message.get('method') == 'Runtime.exceptionThrown':
                self.complaints.append(str(message['params']['exceptionDetails']))
            if message.get('method') == 'Log.entryAdded':
                entry = message['params']['entry']
                if entry['level'] == 'error':
                    self.complaints.append(entry['text'])

    def _receive(self, timeout: float = 60.0) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while b'\0' not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            assert ready, 'the browser does not answer'
            data = os.read(self._answers, 1 << 16)
            assert data, 'the browser has ended'
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b'\0')
        return json.loads(message)
