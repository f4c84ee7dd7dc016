"""Mistakes at the command, as they are typed, each with the line that it ends in.

`docs/messages.md` is made of them, and the test of each runs it: the line there is the line here.
They are typed in a folder with the files of ``make``.
"""

from __future__ import annotations

from pathlib import Path

SCRIPT = """\
import torch

import quorate

trainer = quorate.Trainer(
    torch.nn.Linear(3, 1),
    lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=8,
)
trainer.fit(torch.utils.data.TensorDataset(torch.ones(16, 3)))
"""


def make(folder: Path) -> None:
    """Make what the mistakes are about: a script, a package, an empty run directory, a text."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "notes.txt").write_text("n")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").touch()
    (folder / "runs" / "a").mkdir(parents=True)


# By a heading: what is typed, and the line.
MISTAKES: dict[str, list[tuple[str, str]]] = {
    "Commands": [
        (
            "quorate rnu train.py",
            "quorate: no such command: rnu; did you mean run? see quorate --help",
        ),
        (
            "quorate train.py",
            "quorate: no such command: train.py; did you mean quorate run train.py? "
            "see quorate --help",
        ),
        (
            "quorate --verison",
            "quorate: no such option: --verison; did you mean --version? see quorate --help",
        ),
    ],
    "Scripts and modules": [
        (
            "quorate run",
            "quorate: missing argument 'SCRIPT'; see quorate run --help",
        ),
        (
            "quorate run trian.py",
            "quorate: script: got 'trian.py', expected a Python file; did you mean train.py?",
        ),
        (
            "quorate run runs",
            "quorate: script: got 'runs', expected a Python file; it is a folder: "
            "name a file in it, such as runs/train.py",
        ),
        (
            "quorate run -m",
            "quorate: option -m lacks its value; see quorate run --help",
        ),
        (
            "quorate run -m pkg",
            "quorate: -m: got 'pkg', expected a module that is found from this "
            "folder; it is a package without a __main__.py: name a module in it",
        ),
        (
            "quorate run -m train.py",
            "quorate: -m: got 'train.py', expected a module that is found from this "
            "folder; that is a path: leave out -m",
        ),
        (
            "quorate run -m pkg.nope",
            "quorate: -m: got 'pkg.nope', expected a module that is found from this "
            "folder; give its name with dots, and be in the folder that its first "
            "package is in",
        ),
        (
            "quorate verify trian.py",
            "quorate: script: got 'trian.py', expected a Python file; did you mean train.py?",
        ),
    ],
    "Options of `quorate run`": [
        (
            "quorate run --precison bf16 train.py",
            "quorate: no such option: --precison; did you mean --precision? see quorate run --help",
        ),
        (
            "quorate run --workers",
            "quorate: option --workers lacks its value; see quorate run --help",
        ),
        (
            "quorate run train.py --run-dir",
            "quorate: option --run-dir lacks its value; see quorate run --help",
        ),
        (
            "quorate run --fresh=yes train.py",
            "quorate: option '--fresh' does not take a value; see quorate run --help",
        ),
        (
            "quorate run --shards two train.py",
            "quorate: invalid value for '--shards': 'two' is not a valid integer; see "
            "quorate run --help",
        ),
        (
            "quorate run --devices cpu --workers two train.py",
            "quorate: workers: got 'two', expected a whole number, or two of them, "
            "N:M; N:M is for a Ray cluster: N to begin with, and up to M as nodes "
            "come",
        ),
        (
            "quorate run --devices cpu --workers 0 train.py",
            "quorate: workers: got 0, expected a whole number >= 1 and <= 4096; "
            "choose a larger one",
        ),
        (
            "quorate run --devices cpu --workers 3:2 train.py",
            "quorate: workers: got '3:2', expected N:M with N <= M; did you mean 2:3?",
        ),
        (
            "quorate run --devices cpu --workers 2:3 train.py",
            "quorate: workers: got '2:3', expected one number for another engine; N:M "
            "is for engine='ray', whose nodes come and go",
        ),
        (
            "quorate run --devices cpu --shards 0 train.py",
            "quorate: shards: got 0, expected a whole number >= 1; choose a larger one",
        ),
        (
            "quorate run --devices cpu --shards 9 train.py",
            "quorate: shards: got 9, expected at most the 8 rows of a batch; choose fewer shards",
        ),
        (
            "quorate run --devices cpu --seed -1 train.py",
            "quorate: seed: got -1, expected a whole number >= 0 and <= "
            "18446744073709551615; choose a larger one",
        ),
        (
            "quorate run --devices cudaa:0 train.py",
            "quorate: devices: got 'cudaa:0', expected cpu, cuda, cuda:N, mps or "
            "another device of this torch build; did you mean cuda:0?",
        ),
        (
            "quorate run --devices '' train.py",
            "quorate: devices: got '', expected cpu, cuda, cuda:N, mps or another "
            "device of this torch build; check the spelling",
        ),
        (
            "quorate run --devices cpu:1 train.py",
            "quorate: devices: got 'cpu:1', expected cpu; there is one CPU; see --workers",
        ),
        (
            "quorate run --devices cpu+cpu train.py",
            "quorate: split: 2 stages of a model that calls a single module; take one device for "
            "a replica",
        ),
        (
            "quorate run --devices cpu --engine procesess train.py",
            "quorate: engine: got 'procesess', expected processes, towers, collective "
            "or ray; did you mean processes?",
        ),
        (
            "quorate run --devices cpu --threads 0 train.py",
            "quorate: threads: got 0, expected a whole number >= 1 and <= 1024; "
            "choose a larger one",
        ),
        (
            "quorate run --devices cpu --memory-fraction 1.5 train.py",
            "quorate: memory_fraction: got 1.5, expected at most 1; it is of a device's memory",
        ),
        (
            "quorate run --devices cpu --worker-timeout-s nan train.py",
            "quorate: worker_timeout_s: got nan, expected a number > 0; it is no number: pass one",
        ),
        (
            "quorate run --devices cpu --exchange nativ train.py",
            "quorate: exchange: got 'nativ', expected ordered or native; did you mean native?",
        ),
        (
            "quorate run --devices cpu --loader-workers -1 train.py",
            "quorate: loader_workers: got -1, expected a whole number >= 0; choose a larger one",
        ),
        (
            "quorate run --devices cpu --update quromu:3 train.py",
            "quorate: update: got 'quromu:3', expected sync, quorum:R, async, "
            "bounded:K; did you mean quorum:3?",
        ),
        (
            "quorate run --devices cpu --update quorum train.py",
            "quorate: update: got 'quorum', expected sync, quorum:R, async, "
            "bounded:K; did you mean quorum:R?",
        ),
        (
            "quorate run --devices cpu --shards 2 --update quorum:9 train.py",
            "quorate: update: got 'quorum:9', expected at most the 2 shards of a "
            "batch; choose a smaller quorum, or more shards",
        ),
        (
            "quorate run --devices cpu --update bounded:-1 train.py",
            "quorate: update: got 'bounded:-1', expected sync, quorum:R, async, "
            "bounded:K; bounded:K with a whole number: K must be at least 0",
        ),
        (
            "quorate run --devices cpu --update async:2 train.py",
            "quorate: update: got 'async:2', expected sync, quorum:R, async, "
            "bounded:K; did you mean async?",
        ),
        (
            "quorate run --devices cpu --precision bf61 train.py",
            "quorate: precision: got 'bf61', expected one of fp32, tf32, bf32, bf16, "
            "fp16; did you mean bf16?",
        ),
        (
            "quorate run --devices cpu --kernels onednnn train.py",
            "quorate: kernels: got 'onednnn', expected torch or onednn or measured; "
            "did you mean onednn?",
        ),
        (
            "quorate run --devices cpu --clip-norm 0 train.py",
            "quorate: clip_norm: got 0.0, expected a number > 0; choose a larger one",
        ),
        (
            "quorate run --devices cpu --ema-decay 1 train.py",
            "quorate: ema_decay: got 1.0, expected a number > 0 and < 1; choose a smaller one",
        ),
        (
            "quorate run --devices cpu --nonfinite skipp train.py",
            "quorate: nonfinite: got 'skipp', expected stop or skip; did you mean skip?",
        ),
        (
            "quorate run --devices cpu --spot-check-every -1 train.py",
            "quorate: spot_check_every: got -1, expected a whole number >= 0; choose a larger one",
        ),
        (
            "quorate run --devices cpu --strict train.py",
            "quorate: shards: got None, expected a number: a strict run does not take "
            "it from the number of workers; pass shards=1",
        ),
        (
            "quorate run --devices cpu --log-every 0 train.py",
            "quorate: log_every: got 0, expected a whole number >= 1; choose a larger one",
        ),
        (
            "quorate run --devices cpu --log-format jsn train.py",
            "quorate: log_format: got 'jsn', expected plain or dated or json; did you mean json?",
        ),
        (
            "quorate run --devices cpu --max-time-s 0 train.py",
            "quorate: max_time_s: got 0.0, expected a number > 0; choose a larger one",
        ),
        (
            "quorate run --devices cpu --keep 0 train.py",
            "quorate: keep: got 0, expected a whole number >= 1; choose a larger one",
        ),
        (
            "quorate run --devices cpu --save-every-s -5 train.py",
            "quorate: save_every_s: got -5.0, expected a number > 0; choose a larger one",
        ),
        (
            "quorate run --devices cpu --run-dir train.py train.py",
            "quorate: run_dir: got 'train.py', expected the path of a directory; train.py is not "
            "a directory",
        ),
        (
            "quorate run --devices cpu --run-dir '' train.py",
            "quorate: run_dir: got '', expected the path of a directory; leave it out "
            "to save nothing",
        ),
        (
            "quorate run --devices cpu --init-from nowhere.pt train.py",
            "quorate: weights of nowhere.pt: got No such file or directory, expected "
            "a .safetensors file, or a state dict of tensors by torch.save",
        ),
        (
            "quorate run --profile nowhere/profile.json train.py",
            "quorate: profile: got 'nowhere/profile.json', expected a file in a "
            "folder; make the folder",
        ),
        (
            "quorate run --profile profile.json --profile-s 0 train.py",
            "quorate: profile_s: got 0.0, expected a number > 0; choose a larger one",
        ),
        (
            "quorate run --record nowhere train.py",
            "quorate: record: got 'nowhere', expected an empty folder; make one",
        ),
        (
            "quorate run --detached train.py",
            "quorate: address: got None, expected a cluster for a detached run; say "
            "which, a local one would end with this command: --address HOST:PORT",
        ),
        (
            "quorate run --detached --engine towers train.py",
            "quorate: engine: got 'towers', expected ray for a detached run; leave it out",
        ),
        (
            "quorate run --detached --address 127.0.0.1:1 train.py",
            "quorate: run_dir: got None, expected a folder that the head node has; it "
            "names the run, and is where a coordinator that is lost goes on from: "
            "--run-dir DIR",
        ),
    ],
    "Options of the remaining commands": [
        (
            "quorate inspect",
            "quorate: inspect: no run directory is given; name one, as in quorate inspect "
            "runs/mine, or a cluster with --address",
        ),
        (
            "quorate inspect runs/a",
            "quorate: no checkpoint in runs/a; is it a run directory?",
        ),
        (
            "quorate runs rnus",
            "quorate: FOLDER: got 'rnus', expected a folder; did you mean runs?",
        ),
        (
            "quorate runs --sort size",
            "quorate: sort: got 'size', expected age or name or state or step; choose one of them",
        ),
        (
            "quorate verify --workers one train.py",
            "quorate: workers: got 'one', expected numbers of workers such as 1,2,3; list them",
        ),
        (
            "quorate verify --updates 0 train.py",
            "quorate: updates: got 0, expected a whole number >= 1; choose a larger one",
        ),
        (
            "quorate verify --limit 0 train.py",
            "quorate: limit: got 0.0, expected a number > 0; choose a larger one",
        ),
        (
            "quorate bench --workers 0 train.py",
            "quorate: workers: got '0', expected numbers of workers such as 1,2,4; list them",
        ),
        (
            "quorate bench --repeats 0 train.py",
            "quorate: repeats: got 0, expected a whole number >= 1; choose a larger one",
        ),
        (
            "quorate bench --seconds 0 train.py",
            "quorate: seconds: got 0.0, expected a number > 0; choose a larger one",
        ),
        (
            "quorate bench --out train.py train.py",
            "quorate: out: got 'train.py', expected the path of a directory; train.py is not a "
            "directory",
        ),
        (
            "quorate plan nowhere.json",
            "quorate: nowhere.json: got no file, expected the results.json of quorate bench",
        ),
        (
            "quorate plan notes.txt",
            "quorate: notes.txt, line 1: got no JSON, expected what quorate bench writes; "
            "write it again with quorate bench",
        ),
        (
            "quorate plan --workers 0 notes.txt",
            "quorate: workers: got '0', expected whole numbers >= 1 such as 1,2,4; list them",
        ),
        (
            "quorate plan --plot plan.jpg notes.txt",
            "quorate: plot: got 'plan.jpg', expected a name that ends in .png or .html; choose one",
        ),
        (
            "quorate doctor --threads 0",
            "quorate: threads: got 0, expected a whole number >= 1; choose a larger one",
        ),
        (
            "quorate doctor --workers none",
            "quorate: workers: got 'none', expected a whole number, or two of them, "
            "N:M; N:M is for a Ray cluster: N to begin with, and up to M as nodes "
            "come",
        ),
        (
            "quorate doctor --run-dir runs",
            "quorate: run_dir: got 'runs', expected several hosts to compare it on; "
            "leave it out, or start it on each host: torchrun ... -m quorate doctor",
        ),
        (
            "quorate convert images.gz labels.gz out.tfrecord",
            "quorate: images.gz: got no such file, expected an IDX file",
        ),
        (
            "quorate convert notes.txt out.tfrecord",
            "quorate: sources: got 'notes.txt', expected images and labels, or one "
            ".npz; name them first",
        ),
        (
            "quorate convert notes.txt notes.txt notes.txt",
            "quorate: target: got 'notes.txt', expected a new file; name another, or --overwrite",
        ),
        (
            "quorate convert notes.txt notes.txt out.tfrecord --rows 5",
            "quorate: notes.txt at byte 1: got the end of the file: 6e, expected 4 bytes of magic",
        ),
    ],
}
