"""Runs the commands of README, tutorials and guides in a fresh clone, in the documented ways to install hal.

The environment has the packages that `make demo` leaves in `.venv`, and those that the tests need. Commands and Python
for the emulated NPU run with torch_npu as well, as in `.venv/npu`. Python runs in processes that have not imported hal.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from helpers import clones
from helpers.clones import Clone
from helpers.pages import DOCS, PAGES, blocks, commands, lay_out
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

NOT_RUN = {
    r"^make |^git |^twine |^ls dist|-m build|^source |-m venv|^\. venv": "it sets up, tests or releases a checkout",
    r"^(python -m )?pip install (?!-e|'?\.\[test)": "the environment has what it installs",
    r"vllm|sglang|SGLANG|VLLM|^curl": "tests/engines runs the engines, in environments of their own",
    r"^hal serve": "tests/serve runs it: it does not end",
    r"path/to/|script\.py|pytest tests$": "it names a file of the reader's",
    r"Qwen/|SmolLM2": "it downloads a model",
    r"--shapes|transformers_speed|hal bringup": "it takes minutes",
    r"pytest": "it takes minutes; test_documentation.py runs the tests of pages",
    r"^touch pyproject|^pip install -e \.$|--backend faulty": "it is about a package that the reader writes",
    r"--backend cuda|HAL_CUDA|cuda/bin": "it needs a GPU, or an emulated one in a separate environment",
}
"""Commands that are not run, and why."""
NPU = re.compile(r"npu|hal emulate|emulat(or|ed-cann)")
GUIDES = [page for page in PAGES if page.is_relative_to(DOCS / "how-to")]
TUTORIALS = [page for page in PAGES if page.is_relative_to(DOCS / "tutorials")]
LEARNT = [PAGES[0], *TUTORIALS]


def not_run(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in NOT_RUN)


@pytest.fixture(scope="module")
def clone(request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    made = clones.clone(repository, tmp_path_factory.mktemp(request.param), request.param)
    (made.root / "prompts.txt").write_text("import os\nclass Stack:\n", encoding="utf-8")
    return made


def name(page: Path) -> str:
    return page.stem


WITH_PYTHON = [page for page in (*LEARNT, *GUIDES) if any(each.language == "python" for each in blocks(page))]
NPU_PAGES = ("run-on-an-npu", "use-the-emulated-cann")
WITH_COMMANDS = [page for page in (*LEARNT, *GUIDES) if any(not not_run(each) for each in commands(page))]


def test_every_reason_has_a_command() -> None:
    found = [command for page in (*LEARNT, *GUIDES) for command in commands(page)]
    assert len(found) > 60
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, each) for each in found)] == []
    assert {"README", "quickstart", "first-driver"} <= {page.stem for page in WITH_COMMANDS}


@thorough(PROCESSES, r"\[README-folder")
@thorough(EXHAUSTIVE, r"\[(?!README-folder)")
@pytest.mark.parametrize("clone", clones.WAYS, indirect=True)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_commands(clone: Clone, page: Path) -> None:
    offline = "--quiet --no-deps --no-index --no-build-isolation --disable-pip-version-check"
    script = ["set -e", f'pip() {{ python -m pip "$@" $([ "$1" != install ] || echo {offline}); }}']
    for command in commands(page):
        if not_run(command):
            continue
        needs_npu = NPU.search(command) is not None
        if needs_npu and not clones.has_torch_npu():
            continue
        # The clone's environment comes first in PATH, and stands in for that of `make`.
        run = command.replace(".venv/npu/bin/", "")
        script += [f"echo + {shlex.quote(command)} >&2", f"{clone.npu_variable if needs_npu else ''} {run}"]
    clone.check(clone.root, "bash", "-c", "\n".join(script))


@thorough(PROCESSES, r"\[README-folder")
@thorough(EXHAUSTIVE, r"\[(?!README-folder)")
@pytest.mark.parametrize("clone", clones.WAYS, indirect=True)
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python(clone: Clone, page: Path, tmp_path: Path) -> None:
    npu = page.stem in NPU_PAGES
    if npu and not clones.has_torch_npu():
        pytest.skip("torch_npu is not installed, or aborts beside this torch")
    if not npu and clones.torch_npu_is_installed() and clone.npu is None:
        pytest.skip("torch_npu is installed beside torch, and `import torch` fails without CANN; `make` keeps it apart")
    clone.check(clone.root, "python", str(lay_out(page, tmp_path)), npu=npu)
