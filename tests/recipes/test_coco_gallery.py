"""The gallery of recipes/coco_captioning, in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import python
from loading import RECIPES, load

pytest.importorskip("pycocoevalcap", reason="pycocoevalcap is not installed")
pytest.importorskip("fairseq", reason="fairseq is not installed")
PIL = pytest.importorskip("PIL", reason="pillow is not installed")

gallery, java, scoring = load("coco_captioning", "gallery", "java", "scoring")

ATTACK = "<script>document.title = 'broken'</script><img src=x onerror=\"document.title='broken'\">"
PICTURES = {
    11: ("dogs/wide.jpg", (1200, 300), "RGB"),
    12: ('tall & <thin>\'s "one".png', (60, 640), "RGBA"),
    13: ("grey.png", (90, 90), "LA"),
    14: ("few.png", (40, 40), "P"),
    15: ("turned.jpg", (600, 200), "RGB"),
}
REFERENCES = {
    11: ["A brown dog runs on the beach.", "A dog at the sea"],
    12: ['A thin "tower" </article>&amp;', "{{cards}} a tower"],
    13: ["A grey stone on the ground"],
    14: ["Một con mèo màu đỏ nằm ngủ"],
    15: ["Two boats in the harbour of a small town"],
}
BASELINE = {
    11: "a brown dog runs on the beach",
    12: ATTACK,
    13: "a grey stone",
    14: "một con mèo màu đỏ",
    15: "w" * 200,
}
VEPS = {
    11: "",
    12: "a thin tower {{cards}}",
    13: "a grey stone",
    14: "một con mèo màu đỏ nằm ngủ",
    15: "two boats in the harbour of a small town",
}
EVIL = "base<i>line"
ORDER = [15, 12, 14, 13, 11]  # by the gain of veps


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with test.json, which names its pictures, and what two models say of them."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("data")
    for number, (name, size, mode) in enumerate(PICTURES.values()):
        path = folder / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGB", size, (40 * number, 120, 200)).convert(mode)
        exif = Image.Exif()
        if name == "turned.jpg":
            exif[0x0112] = 6  # to be turned by a quarter
        picture.save(path, exif=exif)
    pairs = [(picture, text) for picture, texts in REFERENCES.items() for text in texts]
    content = {
        "info": {"pictures": str(folder / "pictures")},
        "images": [{"id": n, "file_name": name} for n, (name, *_) in PICTURES.items()],
        "annotations": [
            {"id": n, "image_id": picture, "caption": text}
            for n, (picture, text) in enumerate(pairs)
        ],
    }
    (folder / "test.json").write_text(json.dumps(content), "utf-8")
    for name, captions in (("baseline", BASELINE), ("veps", VEPS)):
        said = [{"image_id": picture, "caption": text} for picture, text in captions.items()]
        (folder / f"{name}.json").write_text(json.dumps(said), "utf-8")
    return folder


def arguments(data: Path, out: Path) -> list[str]:
    return [
        *("--references", str(data / "test.json"), "--out", str(out)),
        *("--captions", f"{EVIL}={data / 'baseline.json'}", f"veps={data / 'veps.json'}"),
    ]


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gallery, by its command, where there is no Java; moved to where nothing else is."""
    folder = tmp_path_factory.mktemp("gallery")
    done = python(
        *(RECIPES / "coco_captioning/gallery.py", *arguments(data, folder / "made")),
        env={**os.environ, "PATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    assert f"{folder / 'made' / 'index.html'}\n" in done.stdout
    return Path(shutil.move(folder / "made", folder / "a folder #1"))


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "missing", lambda: "java is not installed")


def order(page: str) -> list[int]:
    """The pictures of the page, as it stands."""
    return [int(values.split()[-1]) for values in re.findall(r'data-values="(.*?)"', page)]


# ---------------------------------------------------------------------- files


def test_the_page_without_scripts(made: Path, no_java: None) -> None:
    """Complete and in order; its controls, which would do nothing, are hidden."""
    page = (made / "index.html").read_text("utf-8")
    one, other = (scoring.score_captions(REFERENCES, x).cider for x in (BASELINE, VEPS))
    assert sorted(REFERENCES, key=lambda picture: one[picture] - other[picture]) == ORDER
    assert order(page) == ORDER
    assert '<form class="tools" hidden>' in page
    assert re.search(r"(https?:)?//\w", page.replace("<!doctype html>", "")) is None
    names = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert names == {
        *("index.html", "contact.png", "pictures/11.jpg", "pictures/15.jpg"),
        *("pictures/12.png", "pictures/13.png", "pictures/14.jpg"),
    }


def test_the_copies_are_small_and_upright(made: Path) -> None:
    from PIL import Image

    for name, size in (("11.jpg", (480, 120)), ("15.jpg", (160, 480)), ("13.png", (90, 90))):
        with Image.open(made / "pictures" / name) as picture:
            assert picture.size == size


def test_the_contact_sheet(made: Path) -> None:
    """Two rows of cards, on which something is."""
    from PIL import Image

    with Image.open(made / "contact.png") as sheet:
        assert sheet.width == 1492
        assert 700 < sheet.height < 1400
        assert len(sheet.convert("RGB").getcolors(1 << 24)) > 100


def test_a_gallery_is_replaced_and_nothing_else(
    no_java: None, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert gallery.main(arguments(data, out)) == 0  # empty
    (out / "old").touch()
    assert gallery.main(arguments(data, out)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["contact.png", "index.html", "pictures"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    capsys.readouterr()

    other = tmp_path / "other"
    other.mkdir()
    (other / "index.html").write_text("<p>mine</p>")
    for wrong in (other, other / "index.html"):
        assert gallery.main(arguments(data, wrong)) == 1
        assert f"--out {wrong} is there and is no gallery" in capsys.readouterr().err
    assert (other / "index.html").read_text() == "<p>mine</p>"


def test_pictures_that_are_missing_or_broken(
    no_java: None, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written."""
    images = tmp_path / "images"
    shutil.copytree(data / "pictures", images)
    given = [*arguments(data, tmp_path / "new" / "out"), "--images", str(images)]
    (images / "grey.png").write_bytes((images / "grey.png").read_bytes()[:60])
    assert gallery.main(given) == 1
    assert f"{images / 'grey.png'} cannot be read as a picture" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.html"))
    shutil.rmtree(tmp_path / "new")

    (images / "grey.png").unlink()
    (images / "few.png").unlink()
    assert gallery.main(given) == 1
    error = capsys.readouterr().err
    assert error == f"gallery.py: {images}: 2 x missing picture, first: {images / 'grey.png'}\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        (["x.json"], "--captions x.json: give NAME=FILE"),
        (["=x.json"], "--captions =x.json: give NAME=FILE"),
        (["a="], "--captions a=: give NAME=FILE"),
        (["a=x.json", "a=y.json"], "--captions has the name a twice"),
        (["a=x.json"], "x.json is not there"),
    ],
)
def test_captions_that_are_refused(captions, message, data, tmp_path, capsys) -> None:
    given = ["--references", str(data / "test.json"), "--out", str(tmp_path / "out")]
    assert gallery.main([*given, "--captions", *captions]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_references_that_do_not_name_their_pictures(data, tmp_path, capsys) -> None:
    content = json.loads((data / "test.json").read_text("utf-8"))
    del content["info"]
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(content), "utf-8")
    given = [*arguments(data, tmp_path / "out"), "--references", str(plain)]
    assert gallery.main(given) == 1
    assert f"{plain} does not say where its pictures are: give --images" in capsys.readouterr().err


def test_one_model(no_java: None, data: Path, tmp_path: Path) -> None:
    """By its own CIDEr, without a comparison."""
    given = arguments(data, tmp_path / "out")
    assert gallery.main([*given[:-2], given[-1]]) == 0
    page = (tmp_path / "out" / "index.html").read_text("utf-8")
    found = scoring.score_captions(REFERENCES, VEPS).cider
    assert order(page) == sorted(found, key=lambda picture: (-round(found[picture], 1), picture))
    assert "gain" not in re.sub(r"<style>.*?</style>", "", page, flags=re.S)


# ---------------------------------------------------------------------- browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    selenium = pytest.importorskip("selenium", reason="selenium is not installed")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (selenium and program and driver):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options, Service(driver))
    running.set_script_timeout(20)
    yield running
    running.quit()


@pytest.fixture
def page(browser: Any, made: Path) -> Iterator[Any]:
    """Opened as by a double click; afterwards nothing was complained of."""
    browser.get((made / "index.html").as_uri())
    yield browser
    assert browser.get_log("browser") == []


def shown(page: Any) -> list[int]:
    """The pictures that can be seen, in their order."""
    values = page.execute_script(
        "return [...document.querySelectorAll('.card')].filter(x => x.offsetParent !== null)"
        ".map(x => x.dataset.values)"
    )
    return [int(text.split()[-1]) for text in values]


def choose(page: Any, label: str) -> None:
    from selenium.webdriver.support.select import Select

    Select(page.find_element("id", "sort")).select_by_visible_text(label)


def test_cards_show_everything(page: Any) -> None:
    cards = page.find_elements("class name", "card")
    assert shown(page) == ORDER
    for card, picture in zip(cards, shown(page), strict=True):
        page.execute_script("arguments[0].scrollIntoView()", card)
        texts = [x.text for x in card.find_elements("css selector", "dd, .references li")]
        assert texts == [BASELINE[picture], VEPS[picture] or "nothing", *REFERENCES[picture]]
        assert card.find_element("class name", "file").text == PICTURES[picture][0]
        alt = card.find_element("tag name", "img").get_dom_attribute("alt")
        assert alt == REFERENCES[picture][0]
    assert page.title == "Captions of test.json"
    assert page.find_elements("css selector", "main script, main [onerror], th i + i") == []


def test_scores_are_those_of_the_command(page: Any, no_java: None) -> None:
    for row, captions in zip(
        page.find_elements("css selector", "tbody tr"), (BASELINE, VEPS), strict=True
    ):
        table = scoring.score_captions(REFERENCES, captions).table
        cells = [cell.text for cell in row.find_elements("tag name", "td")]
        assert cells == [f"{value:.1f}" for value in table.values()]
    assert page.find_element("css selector", "tbody th").text == EVIL
    notes = page.find_element("class name", "notes").text
    assert f"Tokens: {scoring.PLAIN}" in notes
    assert "Left out: METEOR: java is not installed" in notes
    key = [item.text for item in page.find_elements("css selector", ".key li")]
    assert key == ["3 veps is ahead", "1 even", f"1 {EVIL} is ahead"]


def test_all_pictures_load(page: Any) -> None:
    widths = page.execute_async_script(
        """
        const done = arguments[0];
        (async () => {
          const widths = [];
          for (const image of document.images) {
            image.scrollIntoView();
            await image.decode();
            widths.push(image.naturalWidth);
          }
          done(widths);
        })().catch((error) => done(String(error)));
        """
    )
    assert widths == [160, 45, 40, 90, 480]


def test_sorting(page: Any, no_java: None) -> None:
    baseline = scoring.score_captions(REFERENCES, BASELINE).cider
    choose(page, f"veps loses most to {EVIL}")
    assert shown(page) == ORDER[::-1]
    choose(page, f"CIDEr of {EVIL}, highest first")
    assert shown(page) == sorted(baseline, key=lambda picture: (-baseline[picture], picture))
    choose(page, f"CIDEr of {EVIL}, lowest first")
    assert shown(page) == sorted(baseline, key=lambda picture: (baseline[picture], picture))
    choose(page, "number of the picture")
    assert shown(page) == [11, 12, 13, 14, 15]
    choose(page, f"veps gains most over {EVIL}")
    assert shown(page) == ORDER


def test_filter_and_keyboard(page: Any) -> None:
    """All words, in captions, references or names of files; what is chosen stays sorted."""
    from selenium.webdriver.common.keys import Keys

    count = page.find_element("tag name", "output")
    assert count.text == "5 pictures"
    # The link to the sheet, the table, which may scroll, the order, the filter.
    page.find_element("tag name", "body").send_keys(*[Keys.TAB] * 4)
    field = page.switch_to.active_element
    assert field.get_dom_attribute("id") == "filter"
    field.send_keys("STONE ground", Keys.ENTER)
    assert shown(page) == [13]
    assert count.text == "1 of 5 pictures"
    for words, expected in (("dogs/", [11]), ("<script>", [12]), ("nowhere", []), ("mèo", [14])):
        field.clear()
        field.send_keys(words)
        assert shown(page) == expected
    field.clear()
    field.send_keys("o b")
    choose(page, "number of the picture")
    assert shown(page) == [11, 12, 15]


def test_many_cards(browser: Any, no_java: None, tmp_path: Path) -> None:
    """They come as one scrolls; the filter and the order are of all."""
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    numbers = range(1, 151)
    content = {
        "images": [{"id": n, "file_name": "one.png"} for n in numbers],
        "annotations": [{"id": n, "image_id": n, "caption": f"number {n}"} for n in numbers],
    }
    said = [{"image_id": n, "caption": f"number {n if n % 2 else ''}"} for n in numbers]
    for name, written in (("test.json", content), ("said.json", said)):
        (tmp_path / name).write_text(json.dumps(written), "utf-8")
    given = ["--references", str(tmp_path / "test.json"), "--images", str(tmp_path)]
    given += ["--captions", f"one={tmp_path / 'said.json'}", "--out", str(tmp_path / "out")]
    assert gallery.main(given) == 0
    browser.get((tmp_path / "out" / "index.html").as_uri())
    assert len(shown(browser)) == 120
    choose(browser, "number of the picture")
    assert shown(browser) == list(range(1, 121))
    browser.execute_script("document.getElementById('end').scrollIntoView()")
    deadline = time.monotonic() + 20
    while len(shown(browser)) < 150 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert shown(browser) == list(numbers)
    browser.find_element("id", "filter").send_keys("149")
    assert shown(browser) == [149]
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_is_wider_than_the_screen(page: Any, width: int) -> None:
    """Though a caption is a single word of 200 letters."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.refresh()
        wide = page.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
        right = page.execute_script(
            "return Math.max(...[...document.querySelectorAll('.card *')]"
            ".map(x => x.getBoundingClientRect().right))"
        )
        assert right <= width
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(page: Any, scheme: str) -> None:
    """A contrast of 4.5 (WCAG AA) between text and what is behind it."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    colours = page.execute_script(
        """
        const found = new Set();
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
          const own = walker.currentNode.parentElement;
          if (!walker.currentNode.data.trim() || own.closest("script, option")) continue;
          let behind = own;
          while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)")
            behind = behind.parentElement;
          found.add(getComputedStyle(own).color + getComputedStyle(behind).backgroundColor);
        }
        return [...found];
        """
    )
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert len(colours) >= 6

    def light(red: str, green: str, blue: str) -> float:
        shares = [int(value) / 255 for value in (red, green, blue)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for pair in colours:
        text, behind = (light(*rgb) for rgb in re.findall(r"\((\d+), (\d+), (\d+)\)", pair))
        assert (max(text, behind) + 0.05) / (min(text, behind) + 0.05) >= 4.5, pair
