"""A headless Chromium without network, driven over a pipe: DevTools messages, each ended by a zero byte."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0
"""How long an answer, or a condition on the page, may take."""


def chromium() -> str | None:
    """The program, or None."""
    named = os.environ.get("LOOPWRIGHT_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        """Addresses that the page has requested."""
        self.errors: list[str] = []
        """Exceptions and errors of the page."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer.get("result", {})
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(end - time.monotonic(), 0))
            assert ready, f"no answer of the browser for {SECONDS:.0f} s"
            part = os.read(self._back, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def evaluate(self, code: str) -> Any:
        """The value of an expression on the page; a promise is awaited."""
        found = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while not (value := self.evaluate(condition)):
            assert time.monotonic() < end, f"not true on the page: {condition}"
            time.sleep(0.05)
        return value

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file with a window of this size."""
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.errors.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete' && Boolean(document.body.dataset.written)")

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def mouse(self, kind: str, x: float, y: float, buttons: int = 0) -> None:
        button = "left" if buttons or kind != "mouseMoved" else "none"
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, buttons=1)
        for part in (0.3, 0.6, 1.0):
            self.mouse("mouseMoved", start[0] + part * (end[0] - start[0]), end[1], buttons=1)
        self.mouse("mouseReleased", *end, buttons=1)

    def press(self, key: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, **({"text": text} if text and kind == "keyDown" else {})
            )


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; it ends with the context."""
    program = chromium()
    assert program is not None
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    words = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--proxy-server=127.0.0.1:9", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}",
        "about:blank",
    ]  # fmt: skip
    command = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{back_write}', "bash", *words]
    errors = open(folder.parent / "chromium.log", "wb")
    process = subprocess.Popen(command, pass_fds=(to_read, back_write), stdout=errors, stderr=errors)
    os.close(to_read)
    os.close(back_write)
    try:
        yield Browser(to_write, back_read)
    finally:
        os.close(to_write)
        os.close(back_read)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        errors.close()
