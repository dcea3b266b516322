"""An HTTP server of a folder that fails as it is told: what shards behind a URL may meet."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STALL = 1.5
"""Seconds that a stalling server keeps silent: longer than any client here waits."""


@dataclass
class Served:
    """What the server is to do, and what it has done. faults: one for each request of a .tar, in turn, the last one for
    all that follow if `forever`; requests: (path, first byte, last byte) of each."""

    url: str
    faults: list[str] = field(default_factory=list)
    forever: bool = False
    spoils: str = ".tar"
    requests: list[tuple[str, int, int]] = field(default_factory=list)

    def next_fault(self, path: str) -> str:
        if not self.faults or not path.endswith(self.spoils):
            return ""
        return self.faults[0] if self.forever and len(self.faults) == 1 else self.faults.pop(0)

    def bytes_of(self, ending: str) -> int:
        return sum(last - first + 1 for path, first, last in self.requests if path.endswith(ending))


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Serves a folder on a port of this machine."""
    lock, stopped = threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return None

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if stopped.is_set():  # a connection that was kept open
                self.close_connection = True
                return
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                self.answer(404, b"not here")
                return
            content = path.read_bytes()
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, last = (int(wanted[1]), int(wanted[2])) if wanted else (0, len(content) - 1)
            with lock:
                fault = served.next_fault(self.path)
                served.requests.append((self.path, first, last))
            if fault.isdecimal():
                self.answer(int(fault), b"no")
                return
            if fault == "ignores ranges":
                self.answer(200, content)
                return
            if first >= len(content):
                self.answer(416, b"")
                return
            self.answer(206 if wanted else 200, self.spoilt(content[first : last + 1], fault), fault)

        def spoilt(self, body: bytes, fault: str) -> bytes:
            if fault == "stalls":
                time.sleep(STALL)
            if fault == "gives half":
                return body[: len(body) // 2]
            return body[:-1] + bytes([body[-1] ^ 1]) if fault == "damages" else body

        def answer(self, code: int, body: bytes, fault: str = "") -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            breaks = fault == "breaks off"
            if breaks:
                self.close_connection = True
            if self.command != "HEAD":
                try:
                    self.wfile.write(body[: len(body) // 2] if breaks else body)
                except OSError:
                    self.close_connection = True  # a client that has given up

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        served = Served(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield served
        finally:
            stopped.set()
            server.shutdown()
            thread.join()
