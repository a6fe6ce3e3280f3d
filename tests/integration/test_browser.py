"""The dashboard in a real Chromium: a run started, watched, read token by token, compared, stopped, gone on with, and
its weights taken home. Screenshots go to $SCREENSHOTS where that is set."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.hangs import HANG_SECONDS
from tests.integration.conftest import ROOT, command, until
from tests.integration.test_doctor import rl as train_rl

pytestmark = pytest.mark.browser
TOKEN = "a-token-for-tests"
LONG = 6000  # steps of a run that is stopped before


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here (make test-browser)")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def dashboard(started, tmp_path):
    """Starts one over a directory; its address."""

    def over(root):
        log = tmp_path / "dashboard.log"
        with log.open("w") as out:
            process = started("hone_dashboard", root, log=out)
        until(lambda: "http://" in log.read_text(), process, words=log.read_text)
        return re.search(r"http://[^/]+", log.read_text())[0]

    return over


@pytest.fixture
def started(monkeypatch):
    """The command of the dashboard, and its end; runs that it has started end with it here."""
    from tests.integration import conftest

    processes = []

    def begin(_, root, log):
        words = [conftest.BIN / "hone", "dashboard", root, "--port", "0"]
        processes.append(
            conftest.start(*words, log=log, cwd=root, env={"HONE_DASHBOARD_TOKEN": TOKEN})
        )
        return processes[-1]

    yield begin
    for process in processes:
        conftest.end(process)


def pages(browser, width=1280, height=900, **kwargs):
    """A page, with what it complains about in its list `problems`."""
    page = browser.new_context(
        viewport={"width": width, "height": height}, accept_downloads=True, **kwargs
    ).new_page()
    page.set_default_timeout(1000 * HANG_SECONDS)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    # A run that was just started is not there yet: the page asks for it until it is.
    page.on(
        "console",
        lambda m: (
            page.problems.append(m.text) if m.type == "error" and " 404 " not in m.text else None
        ),
    )
    page.on(
        "dialog",
        lambda dialog: (page.problems.append(f"dialog: {dialog.message}"), dialog.accept()),
    )
    return page


def shot(page, name):
    if place := os.environ.get("SCREENSHOTS"):
        Path(place).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{place}/{name}.png")


def start_run(page, url, place, toml_of):
    page.goto(f"{url}/#/lab")
    text = page.get_by_label("configuration")
    text.fill("")  # of the one before
    page.get_by_label("recipe").select_option(value="configs/prime-rl/reverse-text-tiny.toml")
    until(lambda: len(text.input_value()) > 100)
    text.fill(toml_of(text.input_value()))
    page.get_by_label("output directory").fill(place)
    page.get_by_text("valid", exact=True).wait_for()
    page.get_by_role("button", name="Start").click()
    page.get_by_role("link", name=place).first.click()
    page.get_by_role("heading", name=place).wait_for()


def status_is(page, word):
    page.locator(f"main .status.{word}").first.wait_for()


def test_a_run_from_the_lab_to_its_weights(browser, dashboard, tmp_path):
    root = tmp_path / "lab"
    root.mkdir()
    command("hone", "lab", "setup", "--prime-rl", "--no-install", cwd=root)
    url, page = dashboard(root), pages(browser)

    # The page without a token reads, and starts nothing.
    page.goto(f"{url}/#/lab")
    page.get_by_text("open the address with the token").wait_for()
    page.goto(f"{url}/#token={TOKEN}")
    page.get_by_text("No run is here yet").wait_for()
    page.reload()

    # What is typed is checked by the command's own types.
    page.goto(f"{url}/#/lab")
    page.get_by_label("recipe").select_option(value="configs/prime-rl/reverse-text-tiny.toml")
    text = page.get_by_label("configuration")
    until(lambda: len(text.input_value()) > 100)
    right = text.input_value()
    text.fill(right.replace("max_steps", "max_step"))
    page.get_by_text("did you mean max-steps").wait_for()
    assert page.get_by_role("button", name="Start").is_disabled()

    # Started, and the reward seen to rise while it runs.
    slowly = {"max_steps = 100": "max_steps = 250", "lr = 3e-4": "lr = 4e-5"}
    start_run(
        page,
        url,
        "outputs/first",
        lambda t: functools.reduce(lambda x, y: x.replace(*y), slowly.items(), t),
    )
    now = page.locator("section[aria-label=Reward] .now")
    now.wait_for()
    seen = []
    deadline = time.monotonic() + HANG_SECONDS
    while page.locator("main .status.done").count() == 0:
        assert time.monotonic() < deadline
        seen.append(float(now.inner_text()))
        page.wait_for_timeout(300)
    page.wait_for_timeout(2500)
    seen.append(float(now.inner_text()))
    assert len(set(seen)) > 3, "it was not live"
    metrics = (root / "outputs/first/metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(row)["reward/mean"] for row in (metrics[0], metrics[-1]))
    assert seen[-1] > first, (first, seen)
    assert seen[-1] == pytest.approx(last, abs=1e-3)
    shot(page, "overview")

    # What the run waited for, and what the doctor says.
    page.get_by_role("link", name="Timeline").click()
    page.get_by_text("Where the seconds of a step go").wait_for()
    assert page.locator("svg.timeline rect").count() >= 200
    shot(page, "timeline")
    page.get_by_role("link", name="Doctor").click()
    page.get_by_text(re.compile("No known problems found|The task is solved")).wait_for()

    # A rollout, token by token, by address too.
    page.get_by_role("link", name="Rollouts").click()
    page.get_by_label("text").fill("reversed_text")
    page.get_by_text("32,000 of 32,000 rollouts").wait_for()
    page.locator("th").get_by_role("button", name="Step").click()
    page.locator("tr.click").first.click()
    tokens = page.get_by_role("listbox", name="tokens")
    tokens.get_by_text("<|assistant|>", exact=True).wait_for()
    tokens.focus()
    page.keyboard.press("End")
    facts = page.locator("article dl.facts").last
    facts.get_by_text("probability").wait_for()
    assert "difference" in facts.inner_text() and "ratio 1.0000" in facts.inner_text()
    for mode in ("trained", "difference", "advantage", "masked", "version"):
        page.locator("article select").first.select_option(value=mode)
    page.get_by_role("button", name="Show only its group").click()
    page.get_by_role("list", name="rollouts of the group").wait_for()
    assert page.get_by_role("listitem").count() == 16
    shot(page, "rollout")
    before, address = page.locator("article").inner_text(), page.url
    again = pages(browser, 390, 844, color_scheme="dark")
    again.goto(address)
    again.locator("article h2").first.wait_for()
    again.get_by_role("list", name="rollouts of the group").wait_for()
    assert again.locator("article h2").first.inner_text() == before.splitlines()[0]
    assert again.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shot(again, "rollout_phone")

    # A long run beside it: stopped with a checkpoint, gone on with.
    start_run(
        page, url, "outputs/second", lambda t: t.replace("max_steps = 100", f"max_steps = {LONG}")
    )
    page.locator("section[aria-label=Reward] .now").wait_for()
    page.get_by_role("button", name="Stop").click()
    status_is(page, "stopped")
    page.get_by_role("button", name="Resume").wait_for()
    steps = [
        int(path.name.removeprefix("step_"))
        for path in (root / "outputs/second/checkpoints").iterdir()
    ]
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Stop").wait_for()

    def rows():
        return [
            json.loads(line)["step"]
            for line in (root / "outputs/second/metrics.jsonl").read_text().splitlines()
        ]

    until(lambda: rows()[-1] > max(steps) + 5)
    assert rows() == sorted(set(rows())), "a step was taken twice"
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Resume").wait_for()

    # Two runs side by side.
    page.goto(f"{url}/#/")
    for name in ("first", "second"):
        page.get_by_label(f"choose outputs/{name}:rl").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("Differences between the configurations").wait_for()
    page.locator("section[aria-label='Reward'] canvas").wait_for()
    assert page.get_by_role("cell", name="max_steps", exact=True).count() == 1
    shot(page, "compare")
    phone = pages(browser, 390, 844, color_scheme="dark")
    phone.goto(f"{url}/#/")
    phone.get_by_role("link", name="outputs/first").wait_for()
    shot(phone, "runs_phone")
    phone.goto(f"{url}/#/run/outputs%2Ffirst%3Arl/overview")
    phone.locator("section[aria-label=Reward] canvas").wait_for()
    assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shot(phone, "overview_phone")

    # Its weights, as an archive that transformers takes.
    page.goto(f"{url}/#/run/outputs%2Ffirst%3Arl/checkpoints")
    row = page.get_by_role("row").filter(has_text="Hugging Face weights")
    with page.expect_download() as download:
        row.get_by_role("button", name="Download").click()
    download.value.save_as(tmp_path / "model.tar")
    with tarfile.open(tmp_path / "model.tar") as archive:
        archive.extractall(tmp_path / "home", filter="data")
    # Evaluated now: its rollouts appear as an evaluation.
    row.get_by_role("button", name="Evaluate").click()
    page.get_by_text("vf-eval-001").wait_for()
    status_is(page, "done")
    page.goto(f"{url}/#/?kind=eval")
    page.get_by_role("link", name="reverse-text · ").click()
    page.get_by_text("150 of 150 rollouts").wait_for()
    page.locator("tr.click").first.click()
    page.get_by_text("right answer").wait_for()
    shot(page, "evaluation")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = next((tmp_path / "home").iterdir())
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(place),
        AutoTokenizer.from_pretrained(place),
    )
    assert model.num_parameters() > 1e5 and tokenizer("ab")["input_ids"]
    assert not page.problems and not phone.problems and not again.problems


def cell_of(page, run, column):
    """Return the text of a run's cell in the list."""
    head = page.locator("thead th").all_inner_texts()
    number = next(i for i, text in enumerate(head) if text.startswith(column))
    return page.locator("tbody tr").filter(has_text=run).locator("td").nth(number).inner_text()


def test_a_finished_run_is_found_judged_named_looked_into_and_tried(browser, dashboard, tmp_path):
    root = tmp_path / "root"
    short = ("--max-steps", 24, "--trainer.optim.lr", "4e-4", "--orchestrator.batch-size", 64)
    env = {"id": "reverse-text", "args": {"texts": "generated", "min_chars": 4, "max_chars": 10}}
    held_out = {"interval": 12, "num_examples": 16, "env": [env]}
    evaluated = ("--orchestrator.eval", json.dumps(held_out))
    for seed in (1, 2):
        train_rl(root / f"outputs/seed_{seed}", *short, *evaluated, "--seed", seed)
    train_rl(root / "outputs/broken", *short, "--trainer.optim.lr", "3e-2")
    rows = [json.loads(row) for row in (root / "outputs/seed_1/metrics.jsonl").open()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    url, page = dashboard(root), pages(browser)
    page.goto(f"{url}/#token={TOKEN}")

    # The list: the values of the first and the last step, a badge for what is wrong, sorted.
    page.get_by_role("link", name="outputs/seed_1").wait_for()
    first, last = re.findall(r"[\d.]+", cell_of(page, "outputs/seed_1", "First"))[:2]
    assert float(first) == pytest.approx(rewards[0], abs=1e-3)
    assert float(last) == pytest.approx(rewards[-1], abs=1e-3)
    page.get_by_text("collapse", exact=True).wait_for()
    page.get_by_role("button", name="First → last").click()
    page.locator("th[aria-sort=ascending]").wait_for()
    assert "outputs/broken" in page.locator("tbody tr").first.inner_text()
    shot(page, "runs")

    # A name, a tag and a note, which outlive the page; an archived run is hidden.
    page.get_by_role("link", name="outputs/seed_1").click()
    page.get_by_role("button", name="Name, tags, note").click()
    page.get_by_label("name", exact=True).fill("the baseline")
    page.get_by_label("tags, separated").fill("paper, small")
    page.get_by_label("note", exact=True).fill("kept for <b>comparison</b>")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("heading", name="the baseline").wait_for()
    page.get_by_text("kept for <b>comparison</b>").wait_for()
    page.goto(f"{url}/#/run/outputs%2Fbroken%3Arl/overview")
    page.get_by_text("The policy has collapsed").wait_for()
    page.get_by_role("button", name="Name, tags, note").click()
    page.get_by_label("archived").check()
    page.get_by_role("button", name="Save").click()
    page.goto(f"{url}/#/")
    page.get_by_role("button", name="paper").click()
    until(lambda: page.locator("tbody tr").count() == 1)
    assert "the baseline" in page.locator("tbody").inner_text()
    page.get_by_role("button", name="paper").click()
    until(lambda: page.locator("tbody tr").count() == 2)
    page.get_by_label("archived (1)").check()
    until(lambda: page.locator("tbody tr").count() == 3)

    # The charts: other x axes, smoothing, one zoom for all, a chart of any metric, a step's rollouts.
    page.get_by_role("link", name="the baseline").click()
    reward = page.locator("section[aria-label=Reward]")
    reward.get_by_text("before training").wait_for()
    page.locator("svg.histogram rect").first.wait_for()
    page.get_by_label("x axis").select_option(value="time")
    reward.get_by_text(re.compile(r"step 24, [\d.]+ seconds")).wait_for()
    page.get_by_label("smoothing").fill("0.9")
    until(lambda: "smooth=0.9" in page.url)
    page.get_by_label("add a chart").select_option(value="seq_len/mean")
    page.locator("section[aria-label='seq_len/mean'] canvas").wait_for()
    shot(page, "charts")
    page.get_by_label("x axis").select_option(value="step")
    entropy = page.locator("section[aria-label=Entropy] canvas")
    before = entropy.evaluate("canvas => canvas.toDataURL()")
    box = reward.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 20, steps=5)
    page.mouse.up()
    until(lambda: entropy.evaluate("canvas => canvas.toDataURL()") != before)
    reward.locator(".u-over").click(position={"x": 0.5 * box["width"], "y": 20})
    until(lambda: "step_from=" in page.url)
    page.get_by_text("64 of 1,536 rollouts").wait_for()

    # Another run from this one's configuration: the keys that are not defaults.
    page.get_by_role("link", name="New run from this").click()
    text = page.get_by_label("configuration")
    until(lambda: "lr = 0.0004" in text.input_value())
    whole = (root / "outputs/seed_1/configs/rl.toml").read_text()
    assert len(text.input_value().splitlines()) < 0.5 * len(whole.splitlines())
    page.get_by_text("valid", exact=True).wait_for()

    # Two seeds as a mean with a band.
    page.goto(f"{url}/#/compare")
    for name in ("the baseline", "outputs/seed_2"):
        page.get_by_label(name).check()
    page.get_by_role("button", name="Compare 2").click()
    page.locator("section[aria-label=Reward] canvas").wait_for()
    page.get_by_label("average over seeds").wait_for()
    page.get_by_text("2 seeds").first.wait_for()
    shot(page, "seeds")

    # The weights beside the model before training.
    page.goto(f"{url}/#/run/outputs%2Fseed_1%3Arl/playground")
    page.get_by_role("button", name="Load them").click()
    page.get_by_role("button", name="Ask both").click()
    until(lambda: page.locator(".pair .message").count() == 2)
    until(lambda: page.get_by_text(re.compile(r"\d+ tokens, (stop|length)")).count() == 2)
    shot(page, "playground")
    page.get_by_role("button", name="Unload").click()
    page.get_by_role("button", name="Unload").wait_for(state="detached")
    assert not page.problems, page.problems


SEARCHES = {
    "install": "index.html",
    "own data": "data.html",
    "learning rate": "hyperparameters.html",
    "group size": "hyperparameters.html",
    "out of memory": "gpu.html",
    "reward function": "rewards.html",
    "resume checkpoint": "checkpoints.html",
    "which models are supported": "models.html",
    "custom environment": "environments.html",
    "vllm": "inference.html",
    "evaluate": "evaluation.html",
    "lora": "lora.html",
    "dpo": "preferences.html",
    "slurm": "slurm.html",
}


def test_a_search_of_the_site_finds_the_right_page_first(browser):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, ROOT / "scripts" / "site.py"]
    subprocess.run(words, env=environment, check=True, timeout=HANG_SECONDS)
    site = functools.partial(SimpleHTTPRequestHandler, directory=ROOT / ".site" / "html")
    with ThreadingHTTPServer(("127.0.0.1", 0), site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page, found = pages(browser), {}
        for search in SEARCHES:
            page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
            page.locator("input.md-search__input").click()
            page.locator("input.md-search__input").press_sequentially(search, delay=20)
            page.locator(".md-search-result__item").first.wait_for()
            page.wait_for_timeout(500)  # results of the whole text replace those of its beginning
            link = page.locator(".md-search-result__item a").first.get_attribute("href")
            found[search] = link.split("?")[0].rpartition("/")[2].split("#")[0]
        server.shutdown()
    assert found == SEARCHES


def test_hostile_contents_are_shown_as_text(browser, dashboard, tmp_path):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>\x1b[31m\u202e${alert(3)}"
    root = tmp_path / "root"
    run = root / "a<b>&\"'run"
    (run / "rollouts" / "step_1").mkdir(parents=True)
    (run / "configs").mkdir()
    (run / "logs").mkdir()
    (run / "run_rl.json").write_text(
        json.dumps({"command": "rl", "device": evil, "fork": {"run": evil, "step": 1}})
    )
    (run / "configs" / "rl.toml").write_text(f"max_steps = 1\n[model]\nname = {json.dumps(evil)}\n")
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "reward/mean": 0.5, evil: 1.0, "metrics/<b>/<i>": 2.0})
        + '\n{"step": 2, "rew'
    )
    (run / "logs" / "orchestrator.log").write_text(evil + "\n\x1b]0;owned\x07\n")
    said = {
        "role": evil,
        "content": evil + "A" * 1_000_000,
        "tool_calls": [{"function": {"name": evil}}],
    }
    row = {
        "env": evil,
        "example_id": 1,
        "prompt": [said],
        "completion": [said],
        "answer": evil,
        "reward": 1.0,
        "metrics": {evil: 1.0},
        "stop": evil,
        "error": evil,
        "is_truncated": False,
        "seconds": 1,
        "timings": {evil: 1},
        "turns": [{"prompt_ids": [1], "ids": [2, 10**12], "logprobs": [-1.0, -2.0], "version": 0}],
        "group": 0,
        "member": 0,
        "advantage": 1.0,
        "is_used": True,
        "unused": evil,
    }
    lines = [
        json.dumps(row),
        '{"completion": 3}',
        '["no object"]',
        "\udc80 no JSON",
        json.dumps(row)[:100],
    ]
    (run / "rollouts" / "step_1" / "rollouts.jsonl").write_bytes(
        "\n".join(lines).encode("utf-8", "surrogatepass")
    )
    (tmp_path / "secret.log").write_text("a secret")
    (run / "logs" / "trainer.log").symlink_to(tmp_path / "secret.log")
    (root / "out").symlink_to("/")
    url, page = dashboard(root), pages(browser)
    page.goto(url)
    link = page.get_by_role("link", name="a<b>&\"'run")
    link.wait_for()
    link.click()
    page.locator("section[aria-label=Reward]").wait_for()
    for tab in ("timeline", "rollouts", "checkpoints", "doctor", "config", "logs"):
        page.get_by_role("link", name=tab.title(), exact=True).click()
        page.wait_for_timeout(400)
        assert "a secret" not in page.content()
    page.get_by_role("link", name="Rollouts").click()
    page.locator("tr.click").first.click()
    page.get_by_role("listbox", name="tokens").wait_for()
    page.locator("article .message").first.wait_for()
    assert page.locator("article img, article script").count() == 0
    assert page.locator("img").count() == 0
    assert "<img src=x onerror=alert(1)>" in page.locator("article .message").first.inner_text()
    assert not page.problems, page.problems
