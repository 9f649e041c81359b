"""A headless Chromium for the playground's tests, driven by Playwright."""

from __future__ import annotations

import contextlib
import pathlib
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


UNUSED = "WebUIOmniboxAimPopup,WebUIOmniboxFullPopup,WebUIOmniboxPopup"
"""Features by which each window of a Chromium loads pages for its address bar, though nobody sees one."""
WITHOUT_UNUSED = """#!/bin/sh
for each; do
    case $each in --disable-features=*) each=$each,{unused};; esac
    set -- "$@" "$each"
    shift
done
exec {program} "$@"
"""
"""Adds them to those that Playwright leaves out. Of two lists of features Chromium takes the second alone."""


def chromium_path() -> str | None:
    """Returns the program's path; None if none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def browser(path: str) -> Iterator[Any]:
    """Starts a Chromium with a new profile, which is removed with it."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        script = pathlib.Path(folder) / "chromium"
        script.write_text(WITHOUT_UNUSED.format(unused=UNUSED, program=shlex.quote(path)))
        script.chmod(0o700)
        started = playwright.chromium.launch(executable_path=script, args=[*ARGUMENTS])
        try:
            yield started
        finally:
            started.close()
