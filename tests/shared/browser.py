"""A page in headless Chromium, for tests of the site: it is served from a folder, and posts what it found."""

import functools
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH; on Debian: apt-get install chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def found_by(folder: Path, page: str, profile: Path, timeout_s: float = 120):
    """What `page` of `folder` posts to /found as JSON. queue.Empty where it posts nothing."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Site, directory=str(folder)))
    server.found = queue.Queue()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/{page}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    browser = subprocess.Popen([CHROMIUM, *FLAGS, f"--user-data-dir={profile}", OFFLINE, address], **quiet, start_new_session=True)
    try:
        return server.found.get(timeout=timeout_s)
    finally:
        os.killpg(browser.pid, signal.SIGKILL)  # with the processes that it started
        browser.wait()
        server.shutdown()
        server.server_close()


class Site(SimpleHTTPRequestHandler):
    """The folder, and where the page says what it found."""

    def do_POST(self) -> None:
        self.server.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass
