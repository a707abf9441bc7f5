"""The official `openai` package under Node: one smoke test, where Node is and the package can be had."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.server.live import toy

from klero import SamplingParams

HERE = Path(__file__).parent / "node"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "node"  # git ignores it
SEEDED = {"seed": 7, "max_tokens": 12}


@pytest.fixture(scope="module")
def node():
    """A folder with the package of package.json, which is installed once."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node or npm is not installed")
    wanted = (HERE / "package.json").read_text()
    folder = CACHE / json.loads(wanted)["dependencies"]["openai"]
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text(wanted)
        command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts",
                   "--legacy-peer-deps", "--fetch-retries=0", "--fetch-timeout=10000"]  # fmt: skip
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=12)
        except subprocess.TimeoutExpired:
            pytest.skip("npm did not install the package within 12 s")
        if done.returncode:
            pytest.skip(f"npm could not install the package: {done.stderr.strip()[-200:]}")
        (folder / "done").touch()
    shutil.copy(HERE / "smoke.mjs", folder)
    return folder


def alone(prompt, **fields):
    """The choice of a request that no server sees."""
    return toy().generate([prompt], SamplingParams(temperature=1.0, top_p=1.0, **fields))[0].outputs[0]


def test_the_package_under_node(node, live):
    command = ["node", "smoke.mjs", live.url + "/v1"]
    done = subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    completion, chat = alone("Hello", **SEEDED), alone("[user]Hello[assistant]", min_p=0.01, **SEEDED)
    assert got["models"] == ["toy"]
    assert (got["completion"]["text"], tuple(got["completion"]["token_ids"])) == (completion.text, completion.token_ids)
    assert len(got["completion"]["logprobs"]["token_logprobs"]) == 12
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (5, 12)
    assert got["chat"] == got["streamed"] == chat.text
    assert got["streamedUsage"]["completion_tokens"] == 12
    assert isinstance(json.loads(got["helper"])["yes"], bool)
    assert got["errors"] == [
        ["BadRequestError", 400, "temperature", None], ["NotFoundError", 404, "model", "model_not_found"]
    ]  # fmt: skip
    live.all_free()
