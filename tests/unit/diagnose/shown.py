"""The page in a real browser, without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
#: Marks of tests that need one.
IN_A_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine (apt install chromium)"),
]


class Shown:
    """A page that is open, and what its browser said of it."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        settings = {"viewport": WIDE, "locale": "en-US", "offline": True, **context}
        self.context = browser.new_context(**settings)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.view = self.context.new_page()
        self.view.on("pageerror", lambda error: self.errors.append(str(error)))
        self.view.on("console", lambda said: self.errors.append(said.text))
        self.view.on("dialog", self._on_dialog)
        self.view.on("request", lambda asked: self.requests.append(asked.url))
        self.view.goto(path.as_uri())
        if context.get("java_script_enabled", True):
            self.view.wait_for_selector("html[data-ready=true]", timeout=60_000)

    def _on_dialog(self, dialog: Any) -> None:
        self.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def count(self) -> str:
        return str(self.view.inner_text("#count"))


Open = Callable[..., Shown]
