"""The notebooks, executed from their first cell to their last: an exception in a cell is a failure.

Their own asserts compare digests, after a kill too. The notebooks train on Fashion-MNIST.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from quorate.data import cache_dir

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MISSING = [n for n in ("nbclient", "ipykernel") if importlib.util.find_spec(n) is None]

needs_jupyter = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")


@pytest.mark.slow
@needs_jupyter
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_to_its_end(name: str, tmp_path: Path) -> None:
    if not (cache_dir() / "fashion-mnist").is_dir():
        pytest.skip("Fashion-MNIST is not in the cache: examples/fashion_mnist.py fetches it")
    command = [sys.executable, str(FOLDER / "execute.py"), name, "--to", str(tmp_path / "to")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-4000:]
    notebook = json.loads((tmp_path / "to" / f"{name}.ipynb").read_text())
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in outputs)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_not_committed(name: str) -> None:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
@needs_jupyter
def test_what_awaits_a_user_in_a_notebook(tmp_path: Path) -> None:
    """A mistake is one line; worker processes are refused in one line; a cell run again resumes."""
    import nbformat
    from nbclient import NotebookClient

    cells = [
        """
import torch, quorate
from torch.utils.data import TensorDataset
rows = TensorDataset(torch.randn(16, 2, generator=torch.Generator().manual_seed(0)))
def trainer(**settings):
    return quorate.Trainer(
        lambda: torch.nn.Linear(2, 1),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8, shards=2, devices="cpu", **settings)
""",
        "trainer(workers=2).fit(rows)",
        "trainer(workers=quorate.Workers(2, engine='processes')).fit(rows)",
        """
import os, signal
class Interrupt(quorate.Callback):
    def updated(self, report):
        if report.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)
trainer(run_dir='stopped').fit(rows, epochs=9, callbacks=[Interrupt()])
""",
        "trainer(run_dir='stopped').fit(rows, epochs=9)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    metadata = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", allow_errors=True, resources=metadata
    )
    client.execute()
    shown = ["".join(_text(out) for out in cell.outputs) for cell in notebook.cells]
    assert "8 rows = 2 shards x 4 on 2 cpu workers (1 thread each), sync" in shown[1]
    assert shown[2] == (
        "quorate: engine: got 'processes', expected a script that worker processes can run again; "
        "put the program into a file, or use engine='towers'"
    )
    assert "saved step 3 to stopped/checkpoints" in shown[3]
    assert "KeyboardInterrupt" in shown[3]
    assert "resumed step 3" in shown[4]
    assert "step 18/18" in shown[4]


def _text(out: object) -> str:
    assert isinstance(out, dict)
    return "".join(out["traceback"]) if out["output_type"] == "error" else out.get("text", "")
