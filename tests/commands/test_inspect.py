"""``quorate inspect``: a run's state and digests, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quorate.commands.main import main
from quorate.replica.digest import digest

SAVED = Path(__file__).parents[1] / "services" / "data" / "before-rooms"


def test_a_digest_depends_on_name_shape_dtype_bits_and_order() -> None:
    one = torch.zeros(2, 2)
    different = [
        [("a", one)],
        [("b", one)],
        [("a", one.reshape(4))],
        [("a", one.to(torch.int32))],
        [("a", -one)],
        [("a", one), ("b", one)],
        [("b", one), ("a", one)],
    ]
    assert len(set(map(digest, different))) == len(different)
    assert digest([("a", torch.arange(6.0).reshape(2, 3).T)]) == digest(
        [("a", torch.arange(6.0).reshape(2, 3).T.contiguous())]
    )


def test_a_run_is_inspected_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    check = (
        "import sys; from quorate.commands.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'rich'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else code)"
    )
    command = [sys.executable, "-c", check, "inspect", "--json", str(SAVED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert facts["global_step"] == 10
    assert len(facts["digest"]) == len(facts["averaged_digest"]) == 64
    assert main(["inspect", str(SAVED)]) == 0
    assert facts["digest"] in capsys.readouterr().out
