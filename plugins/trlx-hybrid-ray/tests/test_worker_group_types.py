"""Type checkers see a group's methods, with what the group returns."""

import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parent / "typed_group.py"
ROOT = Path(__file__).parents[3]

CONFIG = """
[mypy]
strict = true
mypy_path = plugins/trlx-hybrid-ray/src
[mypy-torch.*,numpy.*,ray.*,trlx_hybrid.*]
follow_imports = skip
"""  # what groups are typed with needs none of these, and they take a minute to read

REVEALED = {
    "reveal_type(self.score)": "def (list[str], temperature: float =) -> list[float]",
    'group.score(["a"], temperature=0.5)': "list[float]",
    'group.score_later(["a"]))': "trlx_hybrid_ray.worker_group.workers.Future[list[float]]",
    'group.score_later(["a"]).result()': "list[float]",
    'group.load("here")': "int",
    "group.memory()": "list[int]",
    "group.memory_later()": "list[int]",
    'group.save("here")': "str",
    "local.memory()": "list[int]",
    "local.score(local.shorten": "list[float]",
    "bare.workers.memory()": "list[int]",
}


def test_mypy_reveals_the_groups_types_and_finds_wrong_calls(tmp_path):
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path), str(FILE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    lines = FILE.read_text().splitlines()
    notes, errors = {}, {}
    for number, kind, text in re.findall(r"typed_group\.py:(\d+): (note|error): (.*)", done.stdout):
        (notes if kind == "note" else errors).setdefault(lines[int(number) - 1].strip(), []).append(text)
    for part, expected in REVEALED.items():
        (found,) = [text for line, texts in notes.items() if part in line for text in texts if "Revealed" in text]
        assert found == f'Revealed type is "{expected}"', part
    assert sorted(errors) == sorted(line.strip() for line in lines if "# wrong" in line), done.stdout
