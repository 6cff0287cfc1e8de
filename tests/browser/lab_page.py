"""A JupyterLab of one's own on loopback, and a browser page on it: what every browser test needs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
_QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
_SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # else cells out of sight are not on the page
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
_KERNEL_IDLE = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"


def chromium() -> str | None:
    """Where the system's Chromium is, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def running_lab(root: Path, home: Path, theme: str = "JupyterLab Light") -> Iterator[str]:
    """JupyterLab that serves the folder `root` and keeps everything of its own in `home`; yields its URL."""
    settings = {**_SETTINGS, "@jupyterlab/apputils-extension/themes": {"theme": theme}}
    for name, values in settings.items():
        file = home / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "work",
    }
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    options += ["--IdentityProvider.token=", f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True"]
    url = f"http://127.0.0.1:{port}"
    with (home / "lab.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "lab", *options],
            env={**os.environ, **{name: str(home / folder) for name, folder in folders.items()}},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_for(url, server, home / "lab.log")
            yield url
        finally:
            _stop(server)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api", timeout=1):
            return
        assert server.poll() is None, f"JupyterLab ended by itself:\n{log.read_text()}"
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not answer in 60 s:\n{log.read_text()}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and its kernels: they share its process group."""
    os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait(10)


@contextlib.contextmanager
def browser_page(url: str) -> Iterator[tuple[Any, list[str]]]:
    """A page that may only talk to `url`, and the list that collects whatever goes wrong on it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=_QUIET)
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        wrong: list[str] = []
        own = (url, url.replace("http", "ws"), "data:", "blob:")
        page.on("request", lambda r: r.url.startswith(own) or wrong.append(f"request to {r.url}"))
        page.on("pageerror", lambda error: wrong.append(f"page error: {error}"))
        page.on("console", lambda m: m.type == "error" and wrong.append(f"console: {m.text} ({m.location})"))
        yield page, wrong
        browser.close()


def open_and_run(page: Any, url: str, notebook: str) -> None:
    """Open `notebook` and run all of its cells; fails where a cell fails."""
    page.goto(f"{url}/lab/tree/{notebook}?reset", wait_until="domcontentloaded")
    page.wait_for_function(_KERNEL_IDLE, timeout=60_000)
    assert page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')"), f"a cell of {notebook} failed"
