"""The command `headwise`, and `python -m headwise`: it can be stopped from its first moment on."""

from headwise.files.stops import end_on_stops


def main() -> None:
    """Hear stops, then import and run the command line."""
    end_on_stops()
    from headwise.cli import main as command

    command()


if __name__ == "__main__":
    main()
