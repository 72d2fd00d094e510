"""A page for this machine only: the overlay as a stream, and the figures."""

from __future__ import annotations

import json
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from kp2d_core.checks import number, parse_json
from kp2d_ros.startup import shared_file

BOUNDARY = 'kp2d-frame'
PATIENCE = 1.0  # seconds that a stream waits for a frame before it checks whether to end
IDLE = 10.0  # seconds that a reader may be idle
MOST_CHANGES = 100  # changes that wait to be fetched
LONGEST_CHANGE = 1000  # bytes
MOST_READERS = 32  # at once; a browser has 6
# The names of this machine. Requests under another name (DNS rebinding) are refused. The port may
# differ, for example with ssh -L.
HOSTS = ('127.0.0.1', 'localhost', '::1')


class LivePage:
    """Serves on the loopback interface until it is closed; port 0 selects any free port."""

    def __init__(self, port: int = 0) -> None:
        self._changed = threading.Condition()
        self._jpeg = b''
        self._number = 0
        self._figures: dict[str, Any] = {}
        self._closed = False
        self._changes: list[tuple[str, float]] = []
        # Only a reader of the page knows it; pages of other origins do not.
        self._token = secrets.token_urlsafe(16)
        self._page = (
            shared_file('config/live_page.html')
            .read_bytes()
            .replace(b'TOKEN', self._token.encode(), 1)
        )
        try:
            self._server = _Server(('127.0.0.1', port), _handler_of(self))
        except (OSError, OverflowError) as error:
            raise ValueError(f'port {port} cannot be used, 0 is any free one: {error}') from None
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f'http://127.0.0.1:{self._server.server_address[1]}/'

    def show(self, jpeg: bytes) -> None:
        """Show the next frame of the stream."""
        with self._changed:
            self._jpeg = jpeg
            self._number += 1
            self._changed.notify_all()

    def tell(self, figures: dict[str, Any]) -> None:
        """Set the figures of the table."""
        with self._changed:
            self._figures = dict(figures)

    def changes(self) -> list[tuple[str, float]]:
        """Return the parameters (name, value) changed on the page since the last call."""
        with self._changed:
            asked, self._changes = self._changes, []
            return asked

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _answer(self, path: str) -> tuple[str, bytes] | None:
        """Return (content type, body) of everything except the stream; None: not found."""
        with self._changed:
            if path == '/':
                return 'text/html; charset=utf-8', self._page
            if path == '/figures.json':
                body = {**self._figures, 'frames shown': self._number}
                return 'application/json', json.dumps(body).encode()
            if path == '/frame.jpg' and self._jpeg:
                return 'image/jpeg', self._jpeg
        return None

    def _change(self, token: str, body: bytes) -> HTTPStatus:
        """Store the request of a slider; return the status to answer."""
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return HTTPStatus.FORBIDDEN
        try:
            asked = parse_json(body)
            name, value = str(asked['name']), number(asked['value'], 'value')
        except (ValueError, TypeError, KeyError):
            return HTTPStatus.BAD_REQUEST
        with self._changed:
            self._changes = [*self._changes, (name, value)][-MOST_CHANGES:]
        return HTTPStatus.ACCEPTED

    def _next_frame(self, after: int) -> tuple[int, bytes] | None:
        """Return the newest frame with a higher number; b'': none yet, None: the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._number > after, PATIENCE)
            if self._closed:
                return None
            return (self._number, self._jpeg) if self._number > after else (after, b'')


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a stream never ends by itself

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places = threading.BoundedSemaphore(MOST_READERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore readers that disconnect."""


def _handler_of(page: LivePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE

        def do_GET(self) -> None:
            path = self._path()
            if path is None:
                return
            if path == '/stream':
                self._stream()
                return
            answer = page._answer(path)
            if answer is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            kind, body = answer
            self.send_response(HTTPStatus.OK)
            self.send_header('Content-Type', kind)
            self.send_header('Content-Length', str(len(body)))
            self.send_header('Cache-Control', 'no-store')
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            path = self._path()
            if path is None:
                return
            length = self.headers.get('Content-Length', '0')
            if not length.isdecimal() or len(length) > 9 or int(length) > LONGEST_CHANGE:
                self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            elif path != '/parameters':
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                body = self.rfile.read(int(length))
                answer = page._change(self.headers.get('X-Token', ''), body)
                self.send_response(answer)
                self.send_header('Content-Length', '0')
                self.end_headers()

        def _path(self) -> str | None:
            """Return the requested path; None if the request was refused."""
            try:
                path = urlsplit(self.path).path
                host = urlsplit(f'//{self.headers.get("Host", HOSTS[0])}').hostname
            except ValueError:  # such as http://[::1
                self.send_error(HTTPStatus.BAD_REQUEST)
                return None
            if host not in HOSTS:
                self.send_error(HTTPStatus.FORBIDDEN, f'open {page.address}')
                return None
            return path

        def _stream(self) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header('Content-Type', f'multipart/x-mixed-replace; boundary={BOUNDARY}')
            self.send_header('Cache-Control', 'no-store')
            self.end_headers()
            number = 0
            while (found := page._next_frame(number)) is not None:
                number, jpeg = found
                if jpeg:
                    head = (
                        f'--{BOUNDARY}\r\nContent-Type: image/jpeg\r\n'
                        f'Content-Length: {len(jpeg)}\r\n\r\n'
                    )
                    self.wfile.write(head.encode() + jpeg + b'\r\n')

        def end_headers(self) -> None:
            self.send_header('X-Content-Type-Options', 'nosniff')
            self.send_header('Cross-Origin-Resource-Policy', 'same-origin')
            super().end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log requests."""

    return Handler
