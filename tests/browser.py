"""A headless Chromium for tests, over chromedriver's WebDriver protocol (https://www.w3.org/TR/webdriver2/): nothing to install
but Debian's chromium and chromium-driver."""
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not both installed")
SWITCHES = ["--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Left": "\ue012", "Right": "\ue014", "Delete": "\ue017"}
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"     # the protocol's name for a reference to an element


@contextmanager
def chromedriver():
    """-> its address."""
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        port = next(found[1] for line in process.stdout if (found := re.search(r"started successfully on port (\d+)", line)))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


class Browser:
    """One window with a new profile. folder: an empty one, for the profile and downloads."""

    def __init__(self, driver, folder):
        self.downloads, self.address = folder / "downloads", driver
        self.downloads.mkdir(parents=True)
        options = {"binary": CHROMIUM, "args": [*SWITCHES, f"--user-data-dir={folder / 'profile'}"],
                   "prefs": {"download.default_directory": str(self.downloads)}}
        session = self.post("/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
        self.address += f"/session/{session['sessionId']}"

    def post(self, path, body, method="POST"):
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url):
        self.post("/url", {"url": str(url)})

    def run(self, script, *args):
        """The value of a JavaScript expression."""
        return self.post("/execute/sync", {"script": f"return {script}", "args": args})

    def press(self, *keys):
        """Keys where the focus is; a name in KEYS, or text."""
        strokes = [stroke for key in keys for stroke in ([KEYS[key]] if key in KEYS else key)]
        actions = [{"type": kind, "value": stroke} for stroke in strokes for kind in ("keyDown", "keyUp")]
        self.post("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def choose_file(self, css, path):
        element = self.post("/element", {"using": "css selector", "value": css})[ELEMENT]
        self.post(f"/element/{element}/value", {"text": str(path)})

    def devtools(self, command, **parameters):
        return self.post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def size(self, width, height, mobile=False):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def close(self):
        self.post("", {}, "DELETE")
