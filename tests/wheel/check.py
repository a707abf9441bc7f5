"""Build the wheel, and try what the README promises of it in an empty environment.

With its core dependencies alone it samples; once the extra `engine` is there too, with an empty cache, `klero generate`
fetches the default model and answers, and does it again without a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

SAMPLE = """
import json, pathlib, sys
import numpy as np
import klero
assert "site-packages" in klero.__file__, klero.__file__
loaded = {"torch", "triton", "transformers", "typer", "fastapi"} & set(sys.modules)
assert not loaded, f"import klero pulled in {loaded}"
rows = json.loads(pathlib.Path(sys.argv[1]).read_text())["rows"]
for row in rows:
    logits = np.array([[int(h, 16) for h in row["logits"]]], np.uint32).view(np.float32)
    for backend in ("cpu", "reference"):
        sampled = klero.sample(
            logits, klero.SamplingParams(**row["params"]), positions=row["position"], seeds=int(row["seed"]),
            children=row["child"], backend=backend,
        )
        assert sampled.token_ids.tolist() == [row["token"]], (row["name"], backend)
print(f"wheel: {len(rows)} golden rows on both backends, klero {klero.__version__}")
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None, **options: Any) -> Any:
    """Run a command without the repository in sight."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NUMBA_CACHE_DIR", "HF_HUB_OFFLINE")}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=clean | (env or {}), text=True, **options)


def install(place: Path, commands: Path, *what: str | Path) -> None:
    """Install into the environment with these commands."""
    pip = (commands / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    run(*pip, "-c", ROOT / "constraints.txt", *what, cwd=place, check=True)


def check_library(place: Path, commands: Path, wheel: Path) -> None:
    """The core alone: golden rows, and a command that says what it lacks."""
    install(place, commands, wheel)
    shutil.copy(ROOT / "tests" / "golden" / "draw.json", place)
    run(commands / "python", "-c", SAMPLE, "draw.json", cwd=place, check=True)
    bare = run(commands / "klero", cwd=place, capture_output=True)
    assert bare.returncode == 1, bare
    assert "pip install -c constraints.txt '.[engine]'" in bare.stderr, bare.stderr
    print("wheel: the bare command says what to install")


def check_page(wheel: Path) -> None:
    """The files of the server's page, which no import would miss."""
    page = ROOT / "src" / "klero" / "server" / "page"
    with zipfile.ZipFile(wheel) as packed:
        for path in page.iterdir():
            assert packed.read(f"klero/server/page/{path.name}") == path.read_bytes(), path
    print("wheel: the page is in it")


def check_engine(place: Path, commands: Path, wheel: Path) -> None:
    """pip install 'klero[engine]' && klero generate "..."; the second time nothing may come from outside."""
    begin = time.perf_counter()
    install(place, commands, "torch==2.13.0")
    install(place, commands, f"{wheel}[engine]")
    print(f"wheel: klero[engine] installed in {time.perf_counter() - begin:.0f} s")
    env = {"KLERO_CACHE": str(place / "cache"), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(place / "nothing"), "HF_HUB_OFFLINE": "1"}
    texts = []
    for further, said in ((env, True), (env | offline, False)):
        begin = time.perf_counter()
        generate = (commands / "klero", "generate", "The capital of France is", "--max-tokens", "5")
        done = run(*generate, cwd=place, env=further, capture_output=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        assert ("fetching the default model once" in done.stderr) == said, done.stderr
        texts.append(done.stdout.split("---")[0])
        how = "fetched, converted and generated" if said else "generated offline"
        print(f"wheel: {how} in {time.perf_counter() - begin:.0f} s: {texts[-1].splitlines()}")
    assert "Paris" in texts[0], texts
    assert texts[0] == texts[1], texts


def main() -> None:
    """One environment, from nothing to the engine; leave nothing behind."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place, ROOT)
        run(*build, cwd=place, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = place.glob("*.whl")
        run(sys.executable, "-m", "venv", place / "environment", cwd=place, check=True)
        commands = place / "environment" / "bin"
        check_page(wheel)
        check_library(place, commands, wheel)
        check_engine(place, commands, wheel)  # in the same one: what has been compiled is not compiled again


if __name__ == "__main__":
    main()
