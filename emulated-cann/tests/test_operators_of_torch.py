"""Tests of the scripts that run PyTorch's own operators, and the examples of torch_npu's documents."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.thorough import EXHAUSTIVE, thorough
from support import TESTS
from support.children import python


@thorough(EXHAUSTIVE, "all")
@pytest.mark.parametrize(
    "options",
    [pytest.param(("--draw=12", "--samples=3", "--seed=1"), id="drawn"), pytest.param((), id="all")],
)
def test_no_operator_is_wrong(options: tuple[str, ...]) -> None:
    done = python(str(TESTS / "scripts" / "operators_of_torch.py"), *options, timeout=3600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert "operators" in done.stdout


EXAMPLES = """
# An operation

## Examples

```python
>>> torch_npu.npu_swiglu(torch.ones(2, 8).npu())
tensor([[0.7311]])
```

```python
print(absent, torch.npu)
```

```python
torch_npu.npu_silu(torch.ones(2).npu())
```

```python
import torch
raise ValueError("npu")
```

## Prototype

```python
torch_npu.npu_swiglu(input)
```
"""


@thorough(EXHAUSTIVE)
def test_the_outcomes_of_examples(tmp_path: Path) -> None:
    (tmp_path / "operation.md").write_text(EXAMPLES, encoding="utf-8")
    done = python(str(TESTS / "scripts" / "documentation_examples.py"), str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.endswith("4 examples: 1 ran, 1 explained, 1 refused, 1 failed\n")
