"""The engine with speculative decoding on and off; exit code 3 where the engine has no drafter."""

from __future__ import annotations

import argparse
import sys

from realengine.engine import Engine
from serving.config import SchedulerConfig
from serving.errors import UsageError


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.parse_args()
    try:
        Engine(SchedulerConfig(4, num_speculative_tokens=2), None)  # type: ignore[arg-type]
    except UsageError as error:
        sys.stdout.write(f"speculative decoding is not in the engine yet: {error}\n")
        return 3
    sys.stdout.write("the engine can draft now, and this stage does not measure it yet\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
