"""A process reports its failure to the one that started it, also when the disk is full."""

import resource
import signal
import subprocess
import sys

import pytest

from hone.process_report import (
    MESSAGE_CHARS,
    REPORT_BYTES,
    REPORT_VARIABLE,
    claim_report_file,
    read_report,
    reserve_report,
    write_report,
)


@pytest.mark.parametrize("is_reserved", [True, False])
@pytest.mark.parametrize("text", ["plain", "\x01🏖 ü\n" * 5000, "\ud800" * 5000])
def test_a_report_of_any_length_and_characters_is_read_back(
    tmp_path, monkeypatch, text, is_reserved
):
    file = tmp_path / "report.json"
    if is_reserved:
        reserve_report(file)
    assert read_report(file) == {}
    monkeypatch.setenv(REPORT_VARIABLE, str(file))
    claim_report_file()
    write_report(url="http://127.0.0.1:1")
    write_report(error=text, can_resume=True)
    read = read_report(file)
    assert read.pop("error") == text[:MESSAGE_CHARS].replace("\ud800", "?")
    assert read == {"url": "http://127.0.0.1:1", "can_resume": True}
    assert file.stat().st_size == REPORT_BYTES
    monkeypatch.delenv(REPORT_VARIABLE, raising=False)
    claim_report_file()


def test_a_reserved_report_grows_no_file(tmp_path):
    file = tmp_path / "report.json"
    reserve_report(file)
    code = (
        "from hone.process_report import claim_report_file, write_report\n"
        "claim_report_file()\nwrite_report(error='the disk is full')"
    )

    def allow_no_growth():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (REPORT_BYTES, REPORT_BYTES))

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={REPORT_VARIABLE: str(file), "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=allow_no_growth,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert read_report(file) == {"error": "the disk is full"}
