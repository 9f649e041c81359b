"""How soon the playground appears, and how large it is.

`python -m benchmarks.playground URL` opens the page of a running server in new profiles of a headless Chromium, so
nothing is cached. It prints the first contentful paint, in milliseconds after the navigation began, and the bytes of
all that the page loads.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.browser import browser, chromium_path

MAX_PAINT_MS = 200
MAX_BYTES = 150_000
_FIRST_PAINT = "() => performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)[0] ?? 0"


def first_paint_ms(started: Any, url: str) -> tuple[float, int]:
    """Returns the time of the first contentful paint, and the bytes of the page with its files."""
    context = started.new_context()
    sizes: list[int] = []
    page = context.new_page()
    page.on("response", lambda response: sizes.append(int(response.headers.get("content-length", 0))))
    page.goto(url, wait_until="load")
    num_bytes = sum(sizes)
    while not (paint_ms := page.evaluate(_FIRST_PAINT)):
        page.wait_for_timeout(10)
    context.close()
    return paint_ms, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--rounds", type=int, default=20, help="page loads (default: 20)")
    arguments = parser.parse_args()
    path = chromium_path()
    if path is None:
        parser.error("no Chromium is installed; on Debian: apt-get install chromium")
    with browser(path) as started:
        first_paint_ms(started, arguments.url)  # starts Chromium's own processes
        found = [first_paint_ms(started, arguments.url) for _ in range(arguments.rounds)]
    paints = sorted(paint for paint, _ in found)
    print(f"first paint: median {statistics.median(paints):.0f} ms, slowest {paints[-1]:.0f} ms; aim {MAX_PAINT_MS} ms")
    print(f"page and files: {max(num_bytes for _, num_bytes in found):,} bytes; aim {MAX_BYTES:,} bytes")


if __name__ == "__main__":
    main()
