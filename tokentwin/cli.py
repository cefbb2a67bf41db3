"""The command line: `tokentwin COMMAND --help`. Commands load when they run; errors are one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from io import TextIOWrapper
from typing import Any, Literal, get_args, get_origin

from cyclopts import App, CoercionError, CycloptsError, UnknownOptionError, UnusedCliTokensError

from serving.errors import TokenTwinError, UsageError
from tokentwin.provenance import ARGV, VERSION

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit codes besides 0 (done), 1 (failed, or a request was lost) and 3 (--fail-on-slo missed)."""

EXAMPLE = """
Example:
  tokentwin simulate --model llama-3.1-8b --gpu h200 --dataset-name random \\
    --request-rate 20 --goodput ttft:500 tpot:50 --slo p95_ttft:500 -o runs/a

Exit codes:
  0 done; 1 failed, or a request was lost; 2 wrong usage; 3 an SLO was missed
  (--fail-on-slo) or an alert fired (--fail-on-alert); 130 interrupted: what
  happened so far is kept
"""
COMMANDS = (
    ("simulate", "simulate:simulate", "Run a workload on a deployment and judge it."),
    ("run", "run:run", "Run a workload on the real engine and judge it; the files of simulate."),
    ("serve", "serve:serve", "Serve the OpenAI API in front of the engine, or of the twin of a deployment."),
    ("capacity", "capacity:capacity", "Find the highest load that a deployment sustains under an SLO."),
    ("plan", "plan:plan", "Find the cheapest fleet that keeps its promises under a traffic."),
    ("sweep", "sweep:sweep", "Run many points over any flags, in parallel; results in Parquet as they come."),
    ("report", "report:report", "Make the page of a saved run again, or of several runs side by side."),
    (
        "explore",
        "explore:explore",
        "Make a page of a sweep or a plan: limits, trade-offs, heatmaps, each point.",
    ),
    ("diagnose", "diagnose:diagnose", "Say what governs a run's SLO and which simulated change would help."),
    (
        "policy-test",
        "policy_test:policy_test",
        "Check a batch policy and say where it beats the built-in ones.",
    ),
    (
        "measure-acceptance",
        "measure_acceptance:measure_acceptance",
        "Measure on the engine which drafts stand, for the twin.",
    ),
    ("quality", "quality:quality", "Compare quantised weights and KV caches: answers, speed and memory."),
    ("memory", "memory:memory", "Work out where a GPU's memory goes and how many KV pages are left."),
    ("compare", "compare:compare", "Say what variants of a deployment gain and cost on the same workload."),
    ("reading", "reading:read", "Say how a run's answers read: first word, pauses, waits for text."),
    ("diff", "diff:diff", "Explain why two runs differ: workload, schedule, kernel times or host."),
    ("conformance", "conformance:conformance", "Replay recorded vLLM schedules and compare every decision."),
    (
        "calibrate",
        "calibrate_app:app",
        "Make a device profile of measurements: of this machine, or of tables.",
    ),
    ("schema", "schema:schema", "Print the JSON schema of configuration files, for editors."),
    ("validate", "validate:validate", "Replay a real run in the twin and set the two side by side."),
)
GROUPS = (
    (
        "workload",
        "Traffic by itself.",
        (("describe", "workload:describe", "Summarise a workload in numbers."),),
    ),
    (
        "profile",
        "Device profiles.",
        (
            ("list", "shelf:list_profiles", "The shipped profiles."),
            ("show", "shelf:show_profile", "Facts, coefficients, fit errors and hull of a profile."),
        ),
    ),
    (
        "model",
        "Model shapes.",
        (
            ("list", "shelf:list_models", "The shipped models."),
            ("show", "shelf:show_model", "Dimensions, parameters and bytes of a model."),
        ),
    ),
)


def make_app() -> App:
    """The command tree; no command's module is imported yet."""
    app = App(
        name="tokentwin",
        help="A discrete-event twin of LLM serving: will this deployment keep its TTFT and TPOT promises?",
        version=VERSION,
        version_flags=["--version"],
        help_format="plaintext",
        suppress_keyboard_interrupt=False,  # main says that it was interrupted
    )
    for name, where, words in COMMANDS:
        more = {"help_epilogue": EXAMPLE} if name == "simulate" else {}
        app.command(f"tokentwin.commands.{where}", name=name, help=words, **more)
    for group, words, commands in GROUPS:
        inner = App(name=group, help=words, help_format="plaintext")
        for name, where, text in commands:
            inner.command(f"tokentwin.commands.{where}", name=name, help=text)
        app.command(inner)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    ARGV.set(("tokentwin", *tokens))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without the character still gets the numbers
    try:
        code = make_app()(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except TokenTwinError as error:
        return _fail(str(error), error.exit_code)
    except UnusedCliTokensError as error:
        unused = " ".join(error.unused_tokens or ())
        fix = "options start with --, and --help lists them"
        if unused.lower() in ("true", "false", "yes", "no", "on", "off"):
            fix = "a switch takes no value: write --NAME or --no-NAME"
        return _fail(f"unexpected {unused!r}; {fix}", USAGE)
    except UnknownOptionError as error:
        return _fail(_unknown(error), USAGE)
    except CoercionError as error:
        return _fail(_not_taken(error), USAGE)
    except CycloptsError as error:
        return _fail(str(error), USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except UnicodeDecodeError as error:
        return _fail(f"a file is not UTF-8 text: {error}", UsageError.exit_code)
    except OSError as error:
        if error.filename is None and error.strerror is None:
            raise
        if error.filename is None:
            return _fail(str(error.strerror), TokenTwinError.exit_code)
        return _fail(f"{error.filename}: {error.strerror}", UsageError.exit_code)
    return code if isinstance(code, int) else 0


def _unknown(error: UnknownOptionError) -> str:
    """The nearest option of the command; where none is near, the commands that have the option."""
    from tokentwin.schema import commands_with_flags

    name = (error.token.keyword or error.token.value or "").split("=")[0]
    mine = [option for argument in error.argument_collection for option in argument.names]
    owners = [
        command
        for command, flags in commands_with_flags()
        if any(name in (flag.option, *flag.aliases) for flag in flags.values())
    ]
    if not owners or get_close_matches(name, mine, n=1, cutoff=0.8):
        return str(error)
    return f"Unknown option: {name}. It is an option of {', '.join(owners)}."


def _not_taken(error: CoercionError) -> str:
    """The option or argument, what it must be, and what was given."""
    token, argument = error.token, error.argument
    name = (token is not None and token.keyword) or (argument is not None and argument.name) or "an argument"
    if error.msg is not None:
        return f"{name} {error.msg}"
    if token is None:
        return str(error)
    leaves = [leaf for leaf in get_args(error.target_type) or (error.target_type,) if leaf is not type(None)]
    words = [_WORDS.get(leaf) or " or ".join(map(str, get_args(leaf))) for leaf in leaves]
    if get_origin(error.target_type) is Literal or not all(words):
        return str(error)
    return f"{name} must be {' or '.join(words)}, got {token.value!r}"


_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false"}


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"error: {line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
