"""``quorate doctor SCRIPT``: runs the script for one update, and measures its model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quorate.commands.child_run import NO_SAVES_S, child_run, ended_by_sigterm, last_error
from quorate.commands.program import require_program
from quorate.errors import RunError, UserError


def examine_model(
    script: str,
    module: str | None,
    arguments: Sequence[str],
    options: Mapping[str, Any],
    *,
    as_json: bool,
) -> int:
    """Print the needs of a script's model, and the possible cuts.

    Returns:
        1 if the model fits neither one device nor two after a cut, else 0.

    Raises:
        UserError: the script ended with exit code 2, or trains nothing.
        RunError: the script failed otherwise.
    """
    require_program(script, module)
    with (
        tempfile.TemporaryDirectory(prefix="quorate-doctor-", ignore_cleanup_errors=True) as name,
        ended_by_sigterm(),
    ):
        folder = Path(name)
        file = folder / "measured.json"
        how = {
            **options,
            "engine": "towers",
            "workers": 1,
            "run_dir": folder / "run",
            "save_every_s": NO_SAVES_S,
            "measure_model": file,
        }
        with (folder / "output").open("wb") as output:
            code = child_run(how, script, module, arguments, output, file.exists)
        text = (folder / "output").read_text(encoding="utf-8", errors="replace")
        if not file.exists():
            if code == 0:
                raise UserError(f"{script} made no update: nothing was measured")
            kind = UserError if code == 2 else RunError
            raise kind(f"{script} failed: {last_error(text)}")
        record = json.loads(file.read_text(encoding="utf-8"))
    from quorate.commands.doctor.model.measured import ModelMeasurements
    from quorate.commands.doctor.model.table import fits, said, shown

    measured = ModelMeasurements.from_json(record)
    works = fits(measured)
    if as_json:
        more = {"works": works, "said": [*said(measured)], **asdict(measured)}
        print(json.dumps(more, indent=1))
    else:
        print(shown(measured, " ".join([script, *arguments])))
    return int(not works)
