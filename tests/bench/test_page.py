"""The HTML page, in a real browser without a screen."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import loss_core
import pytest
from loss_bench.results import Report, merge

pytest.importorskip("jinja2", reason="the extra loss-bench[report] is not installed")
pytest.importorskip("matplotlib", reason="the extra loss-bench[report] is not installed")
from loss_bench.page import to_html
from loss_bench.plots import plots, write_plots

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt install chromium)")
# Its first start of all takes ten times as long as the next: two processes would both wait for it.
one_browser = pytest.mark.xdist_group("browser")

PROBE = """
<script>
const names = (table) => [...table.tBodies[0].rows].map((row) => row.cells[2].textContent);
const table = document.querySelector("table");
const button = (title) => [...table.querySelectorAll("button")].find((b) => b.textContent === title);
const found = { start: names(table) };
button("x torch").click(); found.up = names(table);
button("x torch").click(); found.down = names(table);
found.sort = button("x torch").parentElement.getAttribute("aria-sort");
button("backend").click(); found.text = names(table);
found.figures = document.querySelectorAll("figure svg").length;
found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
found.loaded = performance.getEntriesByType("resource").filter((r) => !r.name.startsWith("data:")).map((r) => r.name);
const out = document.createElement("pre"); out.id = "probe"; out.textContent = JSON.stringify(found);
document.body.append(out);
</script>
"""


@pytest.fixture
def report(make_row):
    def timed(backend, ms, classes=8, **fields):
        return make_row(backend=backend, median_ms=ms, copy_share=1 / ms, gb_s=100 / ms, speedup=6 / ms,
                        classes=classes, **fields)  # fmt: skip

    rows = [timed(name, ms) for name, ms in (("torch-nn", 6.0), ("<b>&ours", 2.0), ("zebra", 10.0), ("ant", 3.0))]
    rows.append(make_row(backend="off", status="wrong", reason="gradient <i>is NaN"))
    rows += [timed("torch-nn", ms, classes, pass_="no-grad") for classes, ms in ((8, 1.0), (16, 2.0), (32, 4.0))]
    return Report({"device": "fake", "torch": "2", "packages": {}}, ceilings={"copy_gb_s": 400.0}, rows=rows)


def browse(tmp_path, text, *options):
    page = tmp_path / "page.html"
    page.write_text(text)
    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--no-first-run"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_browser
@one_browser
def test_on_a_phone_tables_sort_and_nothing_overflows_or_is_loaded_or_reported(report, tmp_path):
    options = ("--dump-dom", "--virtual-time-budget=3000", "--window-size=500,900")
    dom, console = browse(tmp_path, to_html(report).replace("</body>", PROBE + "</body>"), *options)
    found = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert console == []
    assert found["overflow"] <= 0
    assert found["start"] == ["<b>&ours", "ant", "torch-nn", "zebra", "off"]
    assert found["up"] == ["zebra", "torch-nn", "ant", "<b>&ours", "off"]
    assert found["down"] == ["<b>&ours", "ant", "torch-nn", "zebra", "off"]
    assert found["sort"] == "descending"
    assert found["text"] == ["<b>&ours", "ant", "off", "torch-nn", "zebra"]
    assert found["figures"] == 3
    assert found["loaded"] == []


@needs_browser
@one_browser
def test_screenshot_shows_the_page_and_what_is_broken_would_be_noticed(report, tmp_path):
    from matplotlib.image import imread

    shot = tmp_path / "shot.png"
    text = to_html(report).replace("</body>", "<script>nothing.there()</script></body>")
    _, console = browse(tmp_path, text, f"--screenshot={shot}", "--window-size=900,1200", "--hide-scrollbars")
    assert any("nothing is not defined" in line for line in console)
    pixels = imread(shot)[..., :3]
    assert pixels.shape == (1200, 900, 3)
    rows_with_ink = ((pixels < 0.9).any(axis=2)).any(axis=1)
    assert 0.3 < rows_with_ink.mean() < 1.0
    # The bars are the only colourful thing on the page.
    assert ((pixels.max(axis=2) - pixels.min(axis=2)) > 0.25).sum() > 500


def test_page_holds_everything_itself(report):
    text = to_html(report)
    assert "<b>&ours" not in text
    assert "gradient <i>is NaN" not in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#|data:)""", text.replace('xlink:href="#', ""))
    assert "@import" not in text


def test_columns_of_words_among_numbers_sort_by_their_words(make_row):
    rows = [make_row(rows=4096, classes=8192, dtype="float16", pass_="forward", median_ms=0.1234)]
    text = to_html(Report({"device": "fake"}, {"preset": "seeds"}, rows=rows))
    assert '<td data-key="float16">float16</td>' in text
    assert '<td class="number " data-key="0.123">0.123</td>' in text


def test_each_of_two_devices_has_its_plots_and_its_environment(report, make_row):
    other = Report({"device": "other card", "torch": "2"}, rows=[make_row(device="other card", status="wrong")])
    text = to_html(merge([report, other]))
    assert "<h1>loss-bench on fake, other card</h1>" in text
    assert "Environment of run 2" in text
    # The plots of the first stay, though the second has nothing to draw.
    assert text.count("<figure>") == 3


def test_every_backend_has_a_colour_of_its_own(make_row):
    names = [found.name for found in loss_core.list_backends()]
    assert len(names) >= 12
    report = Report({"device": "fake"}, rows=[make_row(backend=n, median_ms=1.0, copy_share=0.5) for n in names])
    ((_, _, figure),) = plots(report)
    assert len({bar.get_facecolor() for bar in figure.axes[0].patches}) == len(names)


def test_plots_are_written_as_png_and_svg(report, tmp_path):
    files = write_plots(report, tmp_path / "plots")
    assert sorted(file.suffix for file in files) == [".png"] * 3 + [".svg"] * 3
    assert all(file.stat().st_size > 2000 for file in files)
