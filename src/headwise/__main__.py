"""The entry of the command `headwise` and of `python -m headwise`, which handles stops from the start."""

import sys

from headwise.lab.files.stops import end_on_stops


def main() -> None:
    """Handle stops, then import and run the command line."""
    end_on_stops()
    try:
        from headwise.cli import main as command
    except ModuleNotFoundError as error:
        if str(error.name).startswith("headwise."):
            raise
        print(
            f"The command line needs {error.name}, which is not installed: pip install 'headwise[study]'",
            file=sys.stderr,
        )
        # 1 would be the answer "reject"
        sys.exit(5 if sys.argv[1:2] == ["judge"] else 1)
    command()


if __name__ == "__main__":
    main()
