"""The code and commands in README and docs/ work, and their statements about this package are true.

For each page, the tests execute:

* **Python blocks**: all blocks of a page run in order in one namespace, in a separate process. README and the how-to
  pages get a prelude that defines the names they assume (`PRELUDES`); the tutorial needs none. Sizes are made small and
  limits wide (`SMALLER`), and a drive is a temporary directory. Pages without a prelude need several processes or
  modules of the reader; their blocks are only parsed.
* **Bash blocks**, line by line: `ssdtrain-fx doctor`, `probe` and `explain` really run, with small sizes. The other
  subcommands take minutes, so only their arguments are parsed. For `make` the recipe is printed; for `pip install` the
  extra is looked up.

A page may contain no other command: the test fails on commands that it does not know.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import ssdtrain_fx
import ssdtrain_fx.testing
from ssdtrain_fx import OffloadConfig, _torch_private, errors
from ssdtrain_fx.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "ssdtrain_fx"
PAGES = sorted(path for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
"""`docs/notebooks` contains no pages."""

SMALLER = {
    "WIDTH, LAYERS, BATCH = 512, 8, 4096": "WIDTH, LAYERS, BATCH = 64, 2, 8192",
    "max_slowdown=0.1)": "max_slowdown=9.0, recompute=False)",  # the plan offloads something on every machine
    "min_tensor_bytes=4 << 20": "min_tensor_bytes=0",
    "enable(max_slowdown=0.05)": 'enable(policy="all", min_tensor_bytes=0)',
    'options={"max_slowdown": 0.05}': 'options={"policy": "all", "min_tensor_bytes": 0}',
    'TrainingArguments("out"': 'TrainingArguments("out", max_steps=2, use_cpu=True, report_to="none"',
    'SFTConfig("out"': 'SFTConfig("out", max_steps=2, use_cpu=True, bf16=False, report_to="none"',
}

COMMON = """
import torch
import ssdtrain_fx
from torch import Tensor, nn
from ssdtrain_fx import OffloadConfig

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(2))

    def forward(self, x, target=None):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

torch.manual_seed(0)
model = Blocks()
x = torch.randn(8192, 64)
"""

TRAINERS = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "tests" / "trainers")!r}]
import datasets
import lightning
import torch
from small_training import Text, bytes_tokenizer, make_model

torch._inductor.config.cpp.simdlen = 1  # kernels without vector instructions, which compile in half the time
tokenizer = bytes_tokenizer()
pieces = Text(8).pieces.tolist()
dataset = datasets.Dataset.from_dict(dict(input_ids=pieces, labels=pieces)).with_format("torch")

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

make_lightning_module = Module
"""

PRELUDES = {
    "README.md": COMMON + "inputs = (x,)\n",
    "tutorial.md": "",
    "gradient_accumulation.md": COMMON
    + "micro_batches = [x, x + 1]\noptimizer = torch.optim.SGD(model.parameters())\n",
    "checkpointing.md": COMMON + "blocks = list(model.blocks)\n",
    "regional_compilation.md": COMMON + "target = None\n",
    "several_drives.md": COMMON,
    "gpu.md": COMMON,
    "large_vocabularies.md": COMMON,
    "single_modules.md": COMMON,
    "trainers.md": TRAINERS,
    "projections.md": "",
    "torch_compile.md": COMMON + "critic = model\n",
    "command_line.md": "",
}
"""Code that runs before the first block of a page."""


def blocks_of(path: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


COMMANDS = {
    f"{path.name}: {line.split('  #')[0].strip()}": words
    for path in PAGES
    for block in blocks_of(path, "bash")
    for line in block.splitlines()
    if (words := shlex.split(line, comments=True))
}
SLOW = {
    "tutorial.md",
    "gradient_accumulation.md",
    "checkpointing.md",
    "regional_compilation.md",
    "several_drives.md",
    "gpu.md",
    "large_vocabularies.md",
    "single_modules.md",
    "trainers.md",
}
"""Pages whose blocks `make test-all` runs."""
NEEDED = {"trainers.md": ("accelerate", "datasets", "lightning", "peft", "trl")}
"""Packages that a page is about. The extra `test` installs them."""
QUICK = (["ssdtrain-fx", "explain"], ["ssdtrain-fx", "doctor"], ["ssdtrain-fx", "probe"])


def slow_page(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if name in SLOW else []


def slow_probe(words: list[str]) -> list[pytest.MarkDecorator]:
    """Probes take half a minute each: `make test` runs the one without options."""
    return [pytest.mark.slow] if words[1] == "probe" and len(words) > 2 else []


def on_drives(text: str, tmp_path: Path) -> str:
    """Replace the drives that a page names by directories of the test."""
    for name in ("nvme0", "nvme1"):
        (tmp_path / name).mkdir(exist_ok=True)
    return text.replace("/mnt/nvme", str(tmp_path / "nvme"))


def run(command: list[str], tmp_path: Path) -> str:
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_page_with_python_is_run_or_known_not_to_be() -> None:
    with_python = {path.name for path in PAGES if blocks_of(path, "python")}
    # tests/report, tests/test_extending.py and tests/test_distributed.py (which starts ranks) test these pages.
    # The reproduction in first_vector_math_call.md shows a rare race.
    known = {"report.md", "extending.md", "distributed.md", "first_vector_math_call.md"}
    assert with_python - PRELUDES.keys() == known


def test_what_is_made_smaller_is_there() -> None:
    text = "".join(path.read_text() for path in PAGES if path.name in PRELUDES)
    assert [large for large in SMALLER if large not in text] == []


@pytest.mark.parametrize("path", [path for path in PAGES if blocks_of(path, "python")], ids=lambda path: path.name)
def test_python_is_python(path: Path) -> None:
    for block in blocks_of(path, "python"):
        compile(block, str(path), "exec")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=slow_page(path.name), id=path.name) for path in PAGES if path.name in PRELUDES],
)
def test_python_runs(path: Path, tmp_path: Path) -> None:
    for package in NEEDED.get(path.name, ()):
        pytest.importorskip(package, reason=f"{package}, which this page is about, is not installed")
    if path.name == "large_vocabularies.md" and not _torch_private.has_auto_chunker():
        pytest.skip(_torch_private.NO_AUTO_CHUNKER)
    program = "\n".join([PRELUDES[path.name], *blocks_of(path, "python")])
    for large, small in SMALLER.items():
        program = program.replace(large, small)
    if path.name == "tutorial.md":
        program += "\nassert step.offloads > 0\n"
    if path.name == "trainers.md":
        program += "\nassert ssdtrain_fx.statistics().bytes_written > 0\n"
    (tmp_path / "page.py").write_text(
        on_drives(program, tmp_path)
    )  # a file, because Inductor and inspect read its source
    run([sys.executable, "page.py"], tmp_path)
    if path.name == "tutorial.md":
        assert {"x.html", "steps.json"} <= {entry.name for entry in tmp_path.iterdir()}


@pytest.mark.parametrize(("page", "column", "least"), [("faults.md", 3, 40), ("reference/torch_compile.md", 2, 20)])
def test_every_row_names_its_tests(page: str, column: int, least: int) -> None:
    """Each row ends with tests, or programs of a test, that exist."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.endswith("| tests |")]
    assert len(rows) > least
    existing = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:@program\n)?def (\w+)", path.read_text(), re.MULTILINE)
    }
    for row in rows:
        _, *cells, tests, _ = row.split("|")
        named = re.findall(r"`(\w+)`", tests)
        assert len(cells) == column and named, row
        assert [name for name in named if name not in existing] == [], row


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_command_is_understood(words: list[str], tmp_path: Path) -> None:
    match words:
        case ["ssdtrain-fx", *arguments]:
            parse(arguments, tmp_path)
        case ["make", target, *_]:
            assert run(["make", "-n", "-C", str(ROOT), target], tmp_path)
        case ["pip", "install", "-e", what]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(re.findall(r"\w+", what)) <= extras.keys()
        case _:
            pytest.fail(f"the docs contain `{' '.join(words)}`, which this test does not know")


def parse(arguments: list[str], tmp_path: Path) -> None:
    """Parse arguments as the console script does, without running the command."""
    import typer

    arguments = shlex.split(on_drives(shlex.join(arguments), tmp_path))
    group = cast(Any, typer.main.get_command(app))
    with group.make_context("ssdtrain-fx", arguments, resilient_parsing=True) as context:
        _, command, rest = group.resolve_command(context, arguments)
        if rest != ["--list"]:  # exits during parsing
            command.make_context(command.name, rest, parent=context).close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=slow_page(name.split(":")[0]) or slow_probe(words), id=name)
        for name, words in COMMANDS.items()
        if words[:2] in QUICK
    ],
)
def test_command_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = COMMANDS[name]
    arguments = shlex.split(on_drives(shlex.join(words[1:]), tmp_path))
    if words[1] == "explain":
        arguments += [
            "--layers",
            "1",
            "--hidden",
            "64",
            "--batch",
            "1",
            "--sequence",
            "32",
        ]  # the last value of an option counts
    if words[1] == "probe":
        arguments.append("--quick")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.output


TREES = [ast.parse(path.read_text()) for path in sorted((ROOT / "ssdtrain_fx").rglob("*.py"))]
LOGGED = {"log.warning", "log.error", "log.exception", "log.critical", "warnings.warn"}


def template(node: ast.expr) -> str:
    """The text of an expression, with `…` in place of inserted values."""
    match node:
        case ast.Constant(value=str(text)):
            return " ".join(re.sub(r"%(\.\d+)?[sfdir]", "…", text).split())
        case ast.JoinedStr(values=parts):
            texts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts]
            return " ".join("".join(texts).split())
        case _:
            return "…"


def error_names() -> set[str]:
    """Names of the classes in `errors.py`, and of all classes in the package that derive from them."""
    classes = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    while derived := {one.name for one in classes if names & {ast.unparse(base) for base in one.bases}} - names:
        names |= derived
    return names


def messages() -> set[str]:
    """The messages of the package's errors and warnings. Errors that pass on another error's message add none."""
    names = error_names()
    found: set[str] = set()
    for call in (node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        if called in LOGGED:
            texts = [template(call.args[0])]
        elif called in names:
            texts = [template(argument) for argument in call.args]
        else:
            continue
        if called == "InternalError":  # every InternalError ends with what to do
            texts = ["This is a bug in ssdtrain_fx, not in your model. Please report it with the text above."]
        found.update(text for text in texts if re.search(r"\w", text))
    return found


def headings() -> list[str]:
    found = re.findall(r"^### (?:`` ?(.*?) ?``|`(.*)`)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    return ["".join(one) for one in found]


def test_headings_of_troubleshooting_are_messages() -> None:
    texts = [template(node) for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.expr)]
    assert len(headings()) > 50
    assert [heading for heading in headings() if not any(heading in text for text in texts)] == []


def test_every_message_has_a_heading_in_troubleshooting() -> None:
    """A heading is a part of the message, with at least two words to tell it from others."""
    assert len(messages()) > 50
    assert [heading for heading in headings() if len(re.findall(r"\w\w+", heading)) < 2] == []
    assert sorted(text for text in messages() if not any(heading in text for heading in headings())) == []


def test_every_class_of_errors_is_on_the_page() -> None:
    """All except the base class: readers search for an error by its class name."""
    page = (DOCS / "troubleshooting.md").read_text()
    names = error_names() & vars(errors).keys() - {"SSDTrainError"}
    assert sorted(name for name in names if f"`{name}" not in page and f": {name}:" not in page) == []


def test_every_option_is_in_the_table() -> None:
    names = re.findall(r"^\| `(\w+)` \|", (DOCS / "reference" / "configuration.md").read_text(), re.MULTILINE)
    assert sorted(name for name in names if name.islower()) == sorted(
        field.name for field in dataclasses.fields(OffloadConfig)
    )


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    missing = {
        name for name in ssdtrain_fx.__all__ if not re.search(rf"^::: ssdtrain_fx\.(\w+\.)*{name}$", pages, re.M)
    }
    assert all(hasattr(errors, name) for name in missing)  # the page of that module documents these
    assert "::: ssdtrain_fx.errors\n" in pages


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_files_of_the_repository(path: Path) -> None:
    """mkdocs checks the links of the site. README and the pages are also read in the repository."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    assert [target for target in targets if "://" not in target and not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_source_files_that_a_page_names_exist(path: Path) -> None:
    """In the repository, or in a folder of the package. `torch/...` are files of torch."""
    names = re.findall(r"`(?!torch/)([a-z_]+/[a-z_/]+\.(?:py|h|cpp))`", path.read_text())
    assert [name for name in names if not (ROOT / name).is_file() and not any(PACKAGE.rglob(name))] == []


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)]
    run(command, ROOT)
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in PAGES[1:]} <= pages.keys()
    assert [
        name for name, html in pages.items() if "--8&lt;--" in html or re.search(r":(class|func|meth|mod):", html)
    ] == []
    ids = set(re.findall(r'id="(ssdtrain_fx\.[\w.]+)"', "".join(pages.values())))
    for package in (ssdtrain_fx, ssdtrain_fx.testing):
        names = {name for name in package.__all__ if not any(one.split(".")[-1] == name for one in ids)}
        assert names == set(), f"not in the reference: {names}"
