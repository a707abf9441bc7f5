"""Build the wheel, install it with its core dependencies alone into an empty environment, and sample there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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


def run(*command: str | Path, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command without the repository in sight."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=env, text=True, **options)  # type: ignore[call-overload]


def main() -> None:
    """Leave nothing behind."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place, ROOT)
        run(*build, cwd=place, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = place.glob("*.whl")
        run(sys.executable, "-m", "venv", place / "env", cwd=place, check=True)
        python = place / "env" / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
        run(*pip, wheel, cwd=place, check=True)
        shutil.copy(ROOT / "tests" / "golden" / "draw.json", place)
        run(python, "-c", SAMPLE, "draw.json", cwd=place, check=True)
        bare = run(place / "env" / "bin" / "klero", cwd=place, capture_output=True)
        assert bare.returncode == 1, bare
        assert "pip install 'klero[cli]'" in bare.stderr, bare.stderr
        print("wheel: the bare command says what to install")


if __name__ == "__main__":
    main()
