"""Debian's Chromium without a window, driven over its DevTools pipe: open a page, click, type, look.

The pipe (two file descriptors, JSON messages ended by a zero byte) needs no library and no port.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
    "--remote-debugging-pipe",
)
# What the browser answers to a command that the page left behind while it ran.
LEFT_PAGE = ("navigated or closed", "context was destroyed", "Cannot find context", "Promise was collected")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"
)


class LeftPageError(AssertionError):
    """The page went on to another address before it could answer."""


class Browser:
    """One tab. Everything that the page says on its console, and every error, is in `said`."""

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 900, touch: bool = False) -> None:
        here, theirs = os.pipe(), os.pipe()  # what we write and they read; what they write and we read
        self._write, self._read = here[1], theirs[0]
        # The browser looks for its two ends at descriptors 3 and 4; from 10 on they are in nobody's way.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (here[0], theirs[1])]
        shell = f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}'
        command = ["bash", "-c", shell, str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=ends, stdout=quiet, stderr=quiet)
        for end in (here[0], theirs[1], *ends):
            os.close(end)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.said: list[str] = []
        tabs = self.send("Target.getTargets")["targetInfos"]
        tab = next(t["targetId"] for t in tabs if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.size(width, height, touch=touch)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._session = None
        try:
            self.send("Browser.close")
        except (OSError, EOFError):
            self._process.kill()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)

    def size(self, width: int, height: int, *, touch: bool = False) -> None:
        """The window in CSS pixels; a touch screen is a phone's."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)

    def media(self, kind: str = "", *, dark: bool = False) -> None:
        """Medium ("print" or none) and colour scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=kind, features=[scheme])

    def open(self, path: Path) -> None:
        """Load a file and wait until it is drawn."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")
        self.settle()

    def settle(self) -> None:
        """Wait for what the page does on its next two frames, on the page it leads to if it leaves."""
        self.wait("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited. Raises AssertionError with the page's error."""
        done = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 20.0) -> None:
        """Until an expression is true, on whatever page there is by then."""
        until = time.monotonic() + timeout_s
        while not self._true(expression):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.02)

    def _true(self, expression: str) -> bool:
        try:
            return bool(self.js(expression))
        except LeftPageError:
            return False

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, scrolled into view."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        time.sleep(0.15)  # what comes into sight may be drawn only now, and move the rest
        self.js(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        middle = self.js(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({element}.getBoundingClientRect())")
        self.click_at(*middle)

    def click_at(self, x: float, y: float) -> None:
        """A real click at a place of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        time.sleep(0.1)  # plotly looks for what is under the pointer at most every 50 ms
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def press(self, key: str, times: int = 1) -> None:
        """A key such as Tab, Enter or ArrowRight."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            " ": 32,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        text = {"Enter": "\r", " ": " "}.get(key)
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                more = {"text": text} if text and kind == "keyDown" else {}
                self.send(
                    "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **more
                )
        self.settle()

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        more: dict[str, Any] = {"captureBeyondViewport": True} if whole else {}
        if whole:
            width, height = self.js("[innerWidth, document.documentElement.scrollHeight]")
            more["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **more)["data"]))

    def pdf(self, path: Path) -> None:
        """The page printed on A4."""
        done = self.send("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)
        path.write_bytes(base64.b64decode(done["data"]))

    def send(self, method: str, **params: Any) -> Any:
        """One command and its answer; events on the way are kept where they matter."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    gone = any(sign in answer["error"]["message"] for sign in LEFT_PAGE)
                    raise (LeftPageError if gone else AssertionError)(answer["error"])
                return answer["result"]
            self._event(answer)

    def _event(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.said.append(str(details.get("exception", details).get("description", details)))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(a.get("value", a)) for a in params["args"]))
        elif event.get("method") == "Log.entryAdded":
            self.said.append(params["entry"]["text"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            if not part:
                raise EOFError("the browser is gone")
            self._buffer += part
        head, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(head)
        return answer
