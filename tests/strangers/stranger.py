"""Train a case by name: ``stranger.py NAME [--steps N]``."""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import cases  # noqa: F401  lists them
from case import CASES, STEPS

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    CASES[arguments.name]().fit(arguments.steps)
