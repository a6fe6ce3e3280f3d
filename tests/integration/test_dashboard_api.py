"""The dashboard's server over a finished run, as its page asks for it; the page itself is test_browser.py's."""

import re

import pytest

from .conftest import BIN, ON_POLICY_STEPS, command, http, until


@pytest.mark.main_path
def test_the_dashboard_serves_a_finished_run(on_policy_run, started, tmp_path):
    log = tmp_path / "dashboard.log"
    process = started(
        BIN / "hone", "dashboard", on_policy_run.parent, "--port", "0", log=log.open("w")
    )
    until(lambda: "http://" in log.read_text(), process, log.read_text)
    url = re.search(r"http://[^/\s]+", log.read_text())[0]
    (line,) = [
        run
        for run in http.get(f"{url}/api/runs").json()["runs"]
        if run["name"] == on_policy_run.name
    ]
    assert line["status"] == "done" and line["step"] == ON_POLICY_STEPS
    name = line["id"]
    assert "rl" in http.get(f"{url}/api/run", params={"run": name}).json()["configs"]
    until(
        lambda: not http.get(f"{url}/api/rollouts", params={"run": name}).json()["reading"],
        process,
        log.read_text,
    )
    rollouts = http.get(f"{url}/api/rollouts", params={"run": name, "most": 200}).json()
    assert len(rollouts["rows"]) == ON_POLICY_STEPS * 32
    first = http.get(
        f"{url}/api/rollout", params={"run": name, "n": rollouts["rows"][0]["id"]}
    ).json()
    assert first["turns"] and first["sequences"]
    assert http.get(f"{url}/api/doctor", params={"run": name}).status_code == 200
    assert (
        http.get(f"{url}/api/plot", params={"run": name})
        .text.lstrip()
        .startswith(("<?xml", "<svg"))
    )
    assert "<html" in http.get(url).text
    # Starting runs needs the token
    assert http.post(f"{url}/api/lab/start", json={}).status_code in (401, 403)


@pytest.mark.main_path
def test_the_doctor_and_the_plot_of_a_finished_run(on_policy_run, tmp_path):
    command("hone", "doctor", on_policy_run, "--json")
    command("hone", "plot", on_policy_run, "-o", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
