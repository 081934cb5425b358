"""The lines of docs/serving.md do what they say."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


def test_curl_lines(server: Any) -> None:
    if not DOCS.is_file() or shutil.which("curl") is None:
        pytest.skip("docs/serving.md is not beside these tests, or curl is not installed")
    (block,) = re.findall(r"```sh\n(.*?)```", DOCS.read_text(), re.DOTALL)
    lines = re.findall(r"curl (?:.*\\\n)*.*", block)
    assert len(lines) == 10
    for line in lines:
        command = line.replace("http://127.0.0.1:8000", server.url).replace("curl ", "curl -sS --fail-with-body ", 1)
        ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=300)
        assert ended.returncode == 0, (line, ended.stdout, ended.stderr)
        if '"stream": true' in line:
            assert ended.stdout.endswith("data: [DONE]\n\n")
        elif "json_schema" in line:
            answer = json.loads(json.loads(ended.stdout)["choices"][0]["message"]["content"])
            assert set(answer) == {"name", "colour"}
