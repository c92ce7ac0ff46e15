"""How a recipe's scripts talk: help, lines with the time, a spinner, one message for an error."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping

from stages import UserError


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Its help is the docstring of the script: the first line, the options, and all the rest."""
    about, _, rest = (doc or "").partition("\n\n")
    return argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def check_installed(needed: Mapping[str, str]) -> None:
    """UserError unless all modules can be imported; `needed` says in which package each is."""
    absent = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
    if absent:
        raise UserError(f"not installed: {', '.join(absent)}; pip install {' '.join(absent)}")


class Narrator:
    """On a terminal a spinner shows what is being done; elsewhere there are only the lines."""

    def __init__(self, doing: str) -> None:
        # Not at the top of the file, so that --help and check_installed need nothing installed.
        from rich.console import Console

        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = 100  # a log's; rich would wrap at 80
        self._status = self.console.status(doing)
        self._started = time.monotonic()

    def __enter__(self) -> "Narrator":
        self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def say(self, line: str) -> None:
        self.show(line)
        self.console.print(
            f"[{time.monotonic() - self._started:5.1f} s] {line}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )

    def show(self, line: str) -> None:
        """Beside the spinner alone: how far something is."""
        from rich.markup import escape

        self._status.update(escape(line[:60]))


def run_script(name: str, body: Callable[[], None], *, resumes: bool = True) -> int:
    """Runs `body`; the exit status, after a message where the user can do something about it.

    resumes: whether a run that was interrupted is continued by the same command.
    """
    try:
        body()
    except (UserError, OSError) as error:  # OSError: no space, no permission; it names the file
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = "goes on from here" if resumes else "starts again"
        print(f"{name}: interrupted; the same command {again}", file=sys.stderr)
        return 130
    return 0
